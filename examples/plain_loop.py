"""A plain PyTorch loop under a budget: two lines change.

python examples/plain_loop.py --budget '16 MB'
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoestring as ss
from shoestring.lab.models.wide_resnet import wide_resnet


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="16 MB")
    parser.add_argument("--epochs", type=int, default=2)
    budget, epochs = vars(parser.parse_args()).values()

    torch.manual_seed(0)
    images, labels = torch.randn(128, 3, 32, 32), torch.randint(10, (128,))
    loader = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)
    model = wide_resnet(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)

    batch = next(iter(loader))
    step = ss.fit(model, batch, loss=loss, optimizer=optimizer, budget=budget)
    print(step.plan)

    for epoch in range(epochs):
        total = 0.0
        for batch in loader:
            total += float(step(batch))  # in place of zero_grad, backward and optimizer.step
        scheduler.step()
        print(f"epoch {epoch + 1}: loss {total / len(loader):.3f}")
    assert step.measured is not None
    print(f"measured {step.measured.peak_bytes / 1e6:.2f} MB of {budget}")


if __name__ == "__main__":
    main()
