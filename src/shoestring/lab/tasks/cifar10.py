"""CIFAR-10 (Krizhevsky, 2009), read from the standard binary or python layout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import files
from ...errors import InputError, first_line
from .images import ImageTask
from .plain_pickle import load_arrays

TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_FILE = "test_batch"
IMAGES_PER_FILE = 10_000
PIXEL_BYTES = 3 * 32 * 32
BINARY_FILE_BYTES = IMAGES_PER_FILE * (1 + PIXEL_BYTES)
MOST_FILE_BYTES = 4 * BINARY_FILE_BYTES
VALIDATION_IMAGES = 5_000

MEAN = (0.4914, 0.4822, 0.4465)
DEVIATION = (0.2470, 0.2435, 0.2616)
"""Of each channel over the 50,000 training images."""

FOLDERS = tuple(
    f"{outer}{inner}"
    for outer in ("", "cifar10/")
    for inner in ("", "cifar-10-batches-bin", "cifar-10-batches-py")
)
"""Where the files may lie below the folder that was named."""
VARIABLE = "SHOESTRING_DATA"
HOW_TO_GET = (
    "unpack cifar-10-binary.tar.gz (or cifar-10-python.tar.gz) from "
    "https://www.cs.toronto.edu/~kriz/cifar.html and name its folder with --data-dir or "
    f"{VARIABLE}"
)


def cifar10(folder: str | Path | None, split: str, seed: int) -> ImageTask:
    """50,000 images to train on and 10,000 to test, or 45,000 and 5,000 with a validation split."""
    where, suffix = _find(folder)
    read = _read_binary if suffix else _read_python
    images, labels = zip(*(read(where / (name + suffix)) for name in TRAIN_FILES), strict=True)
    test_images, test_labels = read(where / (TEST_FILE + suffix))
    task = ImageTask(
        name="cifar10",
        split="test",
        images=torch.cat(images),
        labels=torch.cat(labels),
        held_out_images=test_images,
        held_out_labels=test_labels,
        classes=10,
        mean=MEAN,
        deviation=DEVIATION,
        padding=4,
        flip=True,
    )
    return task if split == "test" else task.with_validation(VALIDATION_IMAGES, seed)


def _find(folder: str | Path | None) -> tuple[Path, str]:
    """The folder that has the files, and how their names end there."""
    given = folder if folder is not None else os.environ.get(VARIABLE)
    if not given:
        raise InputError("cifar10 needs the folder its files lie in", hint=HOW_TO_GET)
    for inside in FOLDERS:
        where = Path(given) / inside
        for suffix in (".bin", ""):
            if any((where / (name + suffix)).is_file() for name in (*TRAIN_FILES, TEST_FILE)):
                return where, suffix
    raise InputError(
        f"no CIFAR-10 in {given}: neither data_batch_1.bin ({BINARY_FILE_BYTES:,} bytes) nor "
        "data_batch_1 (python layout)",
        hint=HOW_TO_GET,
    )


def _read_binary(path: Path) -> tuple[Tensor, Tensor]:
    """One label byte and 3,072 bytes of pixels, 10,000 times."""
    data = _bytes(path, f"{BINARY_FILE_BYTES:,} bytes")
    if len(data) != BINARY_FILE_BYTES:
        raise _damaged(path, f"{len(data):,} bytes in place of {BINARY_FILE_BYTES:,}")
    rows = np.frombuffer(data, np.uint8).reshape(IMAGES_PER_FILE, 1 + PIXEL_BYTES)
    return _tensors(path, rows[:, 1:], rows[:, 0])


def _read_python(path: Path) -> tuple[Tensor, Tensor]:
    """A pickled dictionary with `data` and `labels`."""
    data = _bytes(path, "about 31 MB")
    try:
        batch = load_arrays(data)
        pixels, labels = (batch.get(key, batch.get(key.decode())) for key in (b"data", b"labels"))
    except Exception as error:  # a damaged pickle can raise anything
        said = first_line(error)
        raise _damaged(path, f"{len(data):,} bytes, about 31 MB expected: {said}") from None
    if isinstance(labels, list) and all(type(label) is int and 0 <= label < 10 for label in labels):
        labels = np.array(labels, dtype=np.int64)
    shape = (IMAGES_PER_FILE, PIXEL_BYTES)
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape != shape:
        raise _damaged(path, f"{_said(pixels)} pixels, not uint8 {shape}")
    if not isinstance(labels, np.ndarray) or labels.shape != shape[:1]:
        raise _damaged(path, f"{_said(labels)} labels, not {shape[0]:,} whole numbers")
    return _tensors(path, pixels, labels)


def _said(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    return f"{type(value).__name__}"


def _bytes(path: Path, expected: str) -> bytes:
    try:
        return files.read(path, MOST_FILE_BYTES)
    except FileNotFoundError:
        raise InputError(f"{path} is missing ({expected})", hint=HOW_TO_GET) from None
    except OSError as error:
        raise InputError(
            f"cannot read {path} ({expected}): {error.strerror}", hint=HOW_TO_GET
        ) from None


def _tensors(path: Path, pixels: np.ndarray[Any, Any], labels: Any) -> tuple[Tensor, Tensor]:
    held = np.asarray(labels).astype(np.int64)
    if held.min() < 0 or held.max() > 9:
        raise _damaged(path, "a label outside of 0 to 9")
    return torch.from_numpy(pixels.reshape(-1, 3, 32, 32).copy()), torch.from_numpy(held)


def _damaged(path: Path, what: str) -> InputError:
    return InputError(f"{path} is damaged: {what}", hint=HOW_TO_GET)
