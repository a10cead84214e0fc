"""Where chunks lie: at their size class, and large tensors of real models at 4096."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from dsdformat import Box, Checkpoint
from dsdformat.chunks import Chunks
from dsdformat.file_plans import plan_files
from dsdformat.format.codecs import RAW
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.payload import size_class
from dsdformat.storage.memory import MemoryStorage, MemoryTarget
from dsdformat.writer import Writer

MIB = 1 << 20
Shapes = dict[str, tuple[int, ...]]


def gpt2() -> Shapes:
    """GPT-2, 124 M parameters, float32."""
    shapes: Shapes = {"wte.weight": (50257, 768), "wpe.weight": (1024, 768)}
    for layer in range(12):
        shapes |= {
            f"h.{layer}.{name}": shape
            for name, shape in {
                "ln_1.weight": (768,), "ln_1.bias": (768,),
                "ln_2.weight": (768,), "ln_2.bias": (768,),
                "attn.c_attn.weight": (768, 2304), "attn.c_attn.bias": (2304,),
                "attn.c_proj.weight": (768, 768), "attn.c_proj.bias": (768,),
                "mlp.c_fc.weight": (768, 3072), "mlp.c_fc.bias": (3072,),
                "mlp.c_proj.weight": (3072, 768), "mlp.c_proj.bias": (768,),
            }.items()
        }  # fmt: skip
    return shapes | {"ln_f.weight": (768,), "ln_f.bias": (768,)}


def llama3_8b() -> Shapes:
    """Llama 3, 8 B parameters, bfloat16."""
    shapes: Shapes = {"embed_tokens.weight": (128256, 4096), "lm_head.weight": (128256, 4096)}
    for layer in range(32):
        shapes |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (4096,), "post_attention_layernorm": (4096,),
                "self_attn.q_proj": (4096, 4096), "self_attn.k_proj": (1024, 4096),
                "self_attn.v_proj": (1024, 4096), "self_attn.o_proj": (4096, 4096),
                "mlp.gate_proj": (14336, 4096), "mlp.up_proj": (14336, 4096),
                "mlp.down_proj": (4096, 14336),
            }.items()
        }  # fmt: skip
    return shapes | {"norm.weight": (4096,)}


MODELS = {
    "gpt2": (gpt2(), "float32", 124_439_808),
    "llama3-8b": (llama3_8b(), "bfloat16", 8_030_261_248),
}


def shard(size: int, ways: int, rank: int) -> tuple[int, int]:
    """Begin and length of a rank's rows, as `torch.chunk` cuts them."""
    step = -(-size // ways)
    begin = min(rank * step, size)
    return begin, min(step, size - begin)


def chunks_of(shapes: Shapes, dtype: str, ways: int, rank: int) -> Chunks:
    """What one of several ranks writes; nothing is allocated."""
    chunks = Chunks()
    for index, (name, shape) in enumerate(sorted(shapes.items())):
        begin, rows = shard(shape[0], ways, rank)
        if rows:
            box = Box((begin, *[0] * (len(shape) - 1)), (rows, *shape[1:]))
            chunks.add(index, ("model", name), DTYPES[dtype], shape, box, RAW, None)
    return chunks


class Place(NamedTuple):
    """A chunk of a rank, and where it lies: in the order of the plan, without gaps."""

    name: str
    nbytes: int
    at: int
    is_large: bool  # the tensor


def places(shapes: Shapes, dtype: str, ways: int, rank: int) -> Iterator[Place]:
    chunks = chunks_of(shapes, dtype, ways, rank)
    for plan in plan_files(chunks, {"format": "pt"}, 4 * MIB):
        assert plan.header_nbytes % 4096 == 0
        at = plan.header_nbytes
        for row, nbytes in zip(plan.rows, plan.lengths, strict=True):
            of_tensor = math.prod(chunks.shape[row]) * chunks.dtype[row].itemsize
            yield Place(chunks.name(row), nbytes, at, of_tensor >= MIB)
            at += nbytes


@pytest.mark.parametrize("model", MODELS)
def test_the_shapes_are_those_of_the_model(model):
    shapes, _, parameters = MODELS[model]
    assert sum(map(math.prod, shapes.values())) == parameters


@pytest.mark.parametrize("ways", range(1, 65))
@pytest.mark.parametrize("model", MODELS)
def test_each_chunk_lies_at_its_size_class_however_the_model_is_sharded(model, ways):
    shapes, dtype, _ = MODELS[model]
    for rank in sorted({0, 1, ways // 2, ways - 1} & set(range(ways))):
        found = list(places(shapes, dtype, ways, rank))
        assert len(found) == sum(shard(shape[0], ways, rank)[1] > 0 for shape in shapes.values())
        assert [one.name for one in found if one.at % size_class(one.nbytes)] == []
        whole_pages = [one for one in found if one.is_large and one.nbytes % 4096 == 0]
        assert [one.name for one in whole_pages if one.at % 4096] == []


@pytest.mark.parametrize("ways", range(1, 65))
def test_all_of_a_llamas_large_tensors_lie_at_4096_however_it_is_sharded(ways):
    shapes, dtype, _ = MODELS["llama3-8b"]
    for rank in {0, ways // 2, ways - 1}:
        large = [one for one in places(shapes, dtype, ways, rank) if one.is_large]
        assert [one.name for one in large if one.at % 4096] == []
        assert all(size_class(one.nbytes) == 4096 for one in large)


def test_all_large_tensors_of_a_whole_gpt2_lie_at_4096_though_one_is_of_no_whole_pages():
    # The 50,257 rows of 3,072 bytes of its embedding are no multiple of 4 KiB.
    shapes, dtype, _ = MODELS["gpt2"]
    large = [one for one in places(shapes, dtype, 1, 0) if one.is_large]
    assert [one.name for one in large if size_class(one.nbytes) < 4096] == ["model/wte.weight"]
    assert [one.name for one in large if one.at % 4096] == []


@pytest.mark.parametrize(
    "size", [0, 1, 2, 3, 4, 8, 16, 24, 48, 63, 64, 255, 256, 4095, 4096, 4097, 1 << 20]
)
def test_a_size_class_is_the_largest_that_divides_a_length(size):
    assert size_class(size) == max(c for c in (4096, 256, 64, 16, 8, 4, 2, 1) if size % c == 0)


def test_what_is_written_lies_where_the_plan_says():
    lengths = (0, 1, 2, 3, 4, 7, 8, 24, 48, 64, 100, 256, 4096, 5000, 8192, 70_000)
    shapes: Shapes = {f"w{n}": (n,) for n in lengths} | {f"m{n}": (n, 1024) for n in (1, 3, 4, 5)}
    planned = {one.name: one.at for one in places(shapes, "uint8", 1, 0)}
    files: dict[str, bytearray] = {}
    with Writer(MemoryTarget(files), threads=1) as made:
        for name, shape in shapes.items():
            made.add_tensor(["model", name], bytes(math.prod(shape)), dtype="uint8", shape=shape)
    with Checkpoint(MemoryStorage(files), threads=1) as checkpoint:
        found = {entry.name: entry.chunks[0].byte_offset for entry in checkpoint}
    assert planned.items() <= found.items()
    assert set(found) - set(planned) == {"model/w0"}  # a tensor without elements lies anywhere
    assert all(at % size_class(math.prod(shapes[name[6:]])) == 0 for name, at in found.items())
