"""Lightning within a budget: a callback.

python examples/lightning_callback.py --budget '3.4 MB'
"""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shoestring.integrations.lightning import BudgetCallback


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]
        self.layers = nn.Sequential(*layers, nn.Linear(64, 10))
        self.losses: list[float] = []

    def training_step(self, batch, number):
        images, labels = batch
        loss = F.cross_entropy(self.layers(images), labels)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, number):
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="3.4 MB")
    budget = parser.parse_args().budget

    torch.manual_seed(0)
    images = torch.randn(4096, 64)
    data = DataLoader(TensorDataset(images, images[:, :10].argmax(1)), batch_size=1024)
    model, within = Classifier(), BudgetCallback(budget)
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", callbacks=[within], logger=False, gradient_clip_val=1.0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, data)
    for number, value in enumerate(model.losses):
        print(f"step {number + 1}: loss {value:.3f}")
    print(within.step.plan)
    print(f"measured {within.step.measured.peak_bytes / 1e6:.2f} MB of {budget}")


if __name__ == "__main__":
    main()
