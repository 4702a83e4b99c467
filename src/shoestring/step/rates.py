"""Learning rates on the device, so that a captured step follows a schedule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim import Adam, AdamW

from ..techniques.base import Setup


class Rates:
    """While a step runs, the optimizer's learning rates are tensors, filled before it.

    Only where the update reads them there: Adam and AdamW that are capturable, and what a technique
    put in the place of the update. Schedulers see the numbers they set.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup, self._optimizer = setup, setup.optimizer
        self._held: dict[int, torch.Tensor] = {}

    def _read_there(self) -> bool:
        if self._setup.rates_on_device():
            return True
        known = isinstance(self._optimizer, (Adam, AdamW))
        return known and all(group["capturable"] for group in self._optimizer.param_groups)

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        """The rates as tensors, until the end."""
        numbers = {
            number: group["lr"]
            for number, group in enumerate(self._optimizer.param_groups)
            if isinstance(group["lr"], (int, float)) and self._read_there()
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
