"""Write checkpoints with tools that the tests do not have, once for each version of a tool.

    pip install lightning==2.6.6
    python tools/make_foreign.py

A file that is there is never written again. `tests/convert/test_foreign_files.py` says what they
hold. What torch, safetensors and transformers write, tests write themselves.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ROOT = Path(__file__).resolve().parent.parent
FOREIGN = ROOT / "tests" / "foreign"


class Regression(lightning.LightningModule):
    """Has two groups of parameters, a buffer, a schedule and hyperparameters."""

    def __init__(self, width: int = 6, rates: tuple[float, ...] = (0.5, 0.25)) -> None:  # noqa: ARG002
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))

    def training_step(self, batch: Any) -> torch.Tensor:
        inputs, wanted = batch
        loss = nn.functional.mse_loss(self.net(inputs), wanted)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        matrices = [one for one in self.parameters() if one.dim() > 1]
        vectors = [one for one in self.parameters() if one.dim() < 2]
        first, second = self.hparams.rates
        groups = [{"params": vectors, "lr": second, "weight_decay": 0.0}, {"params": matrices}]
        optimizer = torch.optim.AdamW(groups, lr=first, betas=(0.75, 0.5))
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler}}


def write_lightning(path: Path) -> None:
    """Train for two epochs, and let the trainer save what it has."""
    lightning.seed_everything(7)
    inputs = torch.arange(24.0).view(8, 3) / 8
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            callbacks=[EarlyStopping("loss", mode="min"), ModelCheckpoint(folder, monitor="loss")],
            default_root_dir=folder,
            enable_model_summary=False,
            enable_progress_bar=False,
            gradient_clip_val=0.5,
            logger=False,
            max_epochs=2,
        )
        trainer.fit(Regression(), data)
        trainer.save_checkpoint(path)


def main() -> None:
    """Write what is not there, and say which."""
    FOREIGN.mkdir(exist_ok=True)
    path = FOREIGN / f"lightning-{lightning.__version__}.ckpt"
    if path.exists():
        sys.exit(f"{path} is there")
    write_lightning(path)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
