"""TensorBoard, for those who have it: the numbers of every evaluation."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ...errors import needs_extra
from ..records.run import Event

_SHOWN = ("train_loss", "loss", "accuracy", "learning_rate", "measured_peak_bytes", "loss_scale")


def check_board(wanted: bool) -> None:
    """InputError where TensorBoard is wanted and not installed."""
    if wanted and importlib.util.find_spec("tensorboard") is None:
        with needs_extra("tensorboard", "tensorboard", "--tensorboard"):
            raise ImportError


class Board:
    """Writes event files beside the records where it is wanted, else nothing."""

    def __init__(self, folder: Path, wanted: bool) -> None:
        self._writer: Any = None
        if wanted:
            with needs_extra("tensorboard", "tensorboard", "--tensorboard"):
                from torch.utils.tensorboard import SummaryWriter
            self._writer = SummaryWriter(folder / "tensorboard")

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *error: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def evaluated(self, event: Event) -> None:
        """One point of every curve."""
        if self._writer is None:
            return
        for name in _SHOWN:
            if event.get(name) is not None:
                self._writer.add_scalar(name, event[name], event["step"])
