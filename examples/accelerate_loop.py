"""A loop with accelerate within a budget: forward and backward become one call.

python examples/accelerate_loop.py --budget '3.4 MB'
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shoestring.integrations.accelerate import prepare_passes


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="3.4 MB")
    budget = parser.parse_args().budget

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    images = torch.randn(4096, 64)
    loader = DataLoader(TensorDataset(images, images[:, :10].argmax(1)), batch_size=1024)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    batch = next(iter(loader))
    passes = prepare_passes(accelerator, model, optimizer, batch, loss=loss, budget=budget)
    for epoch in range(4):
        for batch in loader:
            with accelerator.accumulate(model):
                value = passes(batch)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch + 1}: loss {float(value):.3f}")
    print(passes.step.plan)
    print(f"measured {passes.step.measured.peak_bytes / 1e6:.2f} MB of {budget}")


if __name__ == "__main__":
    main()
