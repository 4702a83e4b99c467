"""Learning rates on the device, so that a captured step follows a schedule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer


class Rates:
    """While a step runs, the optimizer's learning rates are tensors, filled before it.

    Only where the update reads them there: Adam and AdamW in 16 bits or where they are capturable,
    and in 16 bits SGD without noise. Schedulers see the numbers they set.
    """

    def __init__(self, optimizer: Optimizer, precision: str, *, noisy: bool = False) -> None:
        self._optimizer, self._precision, self._noisy = optimizer, precision, noisy
        self._held: dict[int, torch.Tensor] = {}

    def _fused(self) -> bool:
        if isinstance(self._optimizer, (Adam, AdamW)):
            captured = all(group["capturable"] for group in self._optimizer.param_groups)
            return self._precision in ("fp16", "bf16") or captured
        return (
            type(self._optimizer) is SGD
            and self._precision == "fp16"
            and not self._noisy
            and not any(group["dampening"] for group in self._optimizer.param_groups)
        )

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        """The rates as tensors, until the end."""
        numbers = {
            number: group["lr"]
            for number, group in enumerate(self._optimizer.param_groups)
            if isinstance(group["lr"], (int, float)) and self._fused()
        }
        for number, rate in numbers.items():
            if number not in self._held:
                self._held[number] = torch.zeros((), dtype=torch.float32, device=device)
            self._held[number].fill_(rate)
            self._optimizer.param_groups[number]["lr"] = self._held[number]
        try:
            yield
        finally:
            for number, rate in numbers.items():
                self._optimizer.param_groups[number]["lr"] = rate
