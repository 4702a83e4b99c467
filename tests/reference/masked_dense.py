"""Sparse training as the report simulated it: dense weights, a mask over each, and plain loops."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Choose = Callable[[Tensor, int], Tensor]
"""(flat mask of the free positions, how many) → flat positions."""


class MaskedDense:
    """A dense model whose weights are kept at zero outside of their masks."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        masks: dict[str, Tensor],
        choose: Choose,
        threshold: float = 0.001,
        fraction: float = 0.01377866,
    ) -> None:
        self.model, self.optimizer, self.choose = model, optimizer, choose
        self.masks = {name: mask.clone() for name, mask in masks.items()}
        self.threshold, self.fraction = threshold, fraction
        self.weights = {n: p for n, p in model.named_parameters() if n in masks}
        self._apply_masks()

    def _apply_masks(self) -> None:
        for name, weight in self.weights.items():
            weight.data[~self.masks[name]] = 0

    def step(self, loss: Callable[[nn.Module], Tensor]) -> float:
        """Forward, backward, the gradient masked, update, the weight masked."""
        self.optimizer.zero_grad()
        value = loss(self.model)
        value.backward()
        for name, weight in self.weights.items():
            assert weight.grad is not None
            weight.grad[~self.masks[name]] = 0
        self.optimizer.step()
        self._apply_masks()
        return value.item()

    def rewire_dsr(self) -> None:
        """The four steps of dynamic sparse reparameterization."""
        dropped, left = {}, {}
        for name, weight in self.weights.items():
            small = self.masks[name] & (weight.data.abs() < self.threshold)
            self.masks[name] &= ~small
            dropped[name], left[name] = int(small.sum()), int(self.masks[name].sum())
        total_dropped, total_left = sum(dropped.values()), sum(left.values())
        aim = self.fraction * sum(w.numel() for w in self.weights.values())
        if total_dropped < 0.9 * aim:
            self.threshold = 2 * self.threshold
        if total_dropped > 1.1 * aim:
            self.threshold = self.threshold / 2
        # Exact shares, rounded down, and one more for the largest remainders (ties: the first).
        exact = {n: left[n] * total_dropped / total_left for n in self.weights}
        grown = {n: int(exact[n]) for n in self.weights}
        order = sorted(self.weights, key=lambda n: grown[n] - exact[n])
        for name in order[: total_dropped - sum(grown.values())]:
            grown[name] += 1
        self._grow(grown)

    def rewire_set(self) -> None:
        """In each tensor the smallest go and as many come."""
        grown = {}
        for name, weight in self.weights.items():
            positions = self.masks[name].flatten().nonzero().flatten().tolist()
            count = min(len(positions), round(self.fraction * weight.numel()))
            flat = weight.data.flatten()
            for position in sorted(positions, key=lambda i: abs(flat[i].item()))[:count]:
                self.masks[name].view(-1)[position] = False
            grown[name] = count
        self._grow(grown)

    def _grow(self, grown: dict[str, int]) -> None:
        self._apply_masks()
        for name, count in grown.items():
            flat = self.masks[name].view(-1)
            flat[self.choose(~flat, count)] = True
        for weight in self.weights.values():
            for held in self.optimizer.state[weight].values():
                if isinstance(held, Tensor) and held.shape == weight.shape:
                    held.zero_()
