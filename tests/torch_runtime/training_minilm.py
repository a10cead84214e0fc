"""Fine-tune all-MiniLM-L6-v2 so that a line of text is told by the line before it.

The embeddings and the first layers are frozen; the optimizer has the others in two groups. The
first process takes the weights from the package that ships them, and those that resume take them
from the checkpoint alone. Run by test_training_runs.py; `training_crashes.Run` tells the options.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from training_crashes import Run, read_text

import dsdformat.torch as dsd

BATCH, LENGTH_MAX = 4, 16
FROZEN_LAYERS = 4


def embed(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean over the tokens of each sentence, at length 1."""
    mask = (tokens != 0).long()
    hidden = model(input_ids=tokens, attention_mask=mask).last_hidden_state
    return F.normalize((hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True), dim=1)


def divide(model: nn.Module) -> list[dict[str, object]]:
    """Freeze the lower part; return the rest in a group with weight decay and one without."""
    for part in (model.embeddings, model.encoder.layer[:FROZEN_LAYERS]):
        part.requires_grad_(False)
    rest = [weight for weight in model.parameters() if weight.requires_grad]
    return [
        {"params": [weight for weight in rest if weight.ndim > 1]},
        {"params": [weight for weight in rest if weight.ndim <= 1], "weight_decay": 0.0},
    ]


def main() -> None:
    from transformers import BertConfig, BertModel

    run = Run()
    run.settle()
    tokenizer = Tokenizer.from_file(str(run.weights / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH_MAX)
    tokenizer.enable_padding(length=LENGTH_MAX)
    text = [line for line in read_text().splitlines() if len(line) > 40][: 16 * BATCH]
    tokens = torch.tensor([line.ids for line in tokenizer.encode_batch(text)])

    resumes = run.path.exists()
    if resumes:
        model = BertModel(BertConfig.from_pretrained(run.weights))
    else:
        model = BertModel.from_pretrained(run.weights)
    model.train()
    optimizer = torch.optim.AdamW(divide(model), lr=0.001)
    state = {"model": model, "optimizer": optimizer}

    step = 0
    if resumes:
        rest = dsd.load(run.path, {**state, "step": 0, "rng": None})
        step = rest["step"]
        dsd.set_rng_state(rest["rng"])

    while step < run.steps:
        lines = torch.randperm(len(tokens) - 1)[:BATCH]
        alike = embed(model, tokens[lines]) @ embed(model, tokens[lines + 1]).T
        loss = F.cross_entropy(alike / 0.1, torch.arange(BATCH))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        run.log(step, loss.item())
        if run.saves_at(step):
            now = {**state, "step": step, "rng": dsd.rng_state()}
            dsd.save(run.path, now, overwrite=True)
        run.may_die(step)

    print(dsd.save(run.path, {**state, "step": step, "rng": dsd.rng_state()}, overwrite=True))


if __name__ == "__main__":
    main()
