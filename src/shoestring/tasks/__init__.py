"""Data to train on, by name: `digits` comes with scikit-learn, `cifar10` is read from a folder."""

from __future__ import annotations

from pathlib import Path

from ..errors import InputError
from .images import ImageTask

NAMES = ("digits", "cifar10")
SPLITS = ("test", "validation")

__all__ = ["NAMES", "SPLITS", "ImageTask", "load_task"]


def load_task(
    name: str, *, folder: str | Path | None = None, split: str = "test", seed: int = 0
) -> ImageTask:
    """The task of that name.

    `split` is what is evaluated: "test", after training on all training images, or "validation",
    a part of the training images that `seed` draws and training leaves out (5,000 of CIFAR-10's
    50,000, as in the report).
    """
    if split not in SPLITS:
        raise InputError(f"unknown split {split!r}", hint="one of " + ", ".join(SPLITS))
    if name == "digits":
        from .digits import digits

        return digits(split, seed)
    if name == "cifar10":
        from .cifar10 import cifar10

        return cifar10(folder, split, seed)
    raise InputError(f"no data is called {name!r}", hint="one of " + ", ".join(NAMES))
