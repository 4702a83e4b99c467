"""Images of one's own: a folder with `images.npz`, in any shape.

The file has `train_images`, `train_labels`, `test_images` and `test_labels`: 8-bit images of shape
(n, channels, height, width) or (n, height, width), and whole numbers from 0 as labels.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...errors import InputError
from .images import ImageTask

FILE = "images.npz"
VALIDATION_PART = 10
"""One image in so many is held out by a validation split."""
_HINT = (
    f"{FILE} has train_images, train_labels, test_images, test_labels: uint8 (n, channels, height, "
    "width) and labels from 0"
)


def is_image_folder(name: str | Path) -> bool:
    """Whether it is a folder of images."""
    return (Path(name) / FILE).is_file()


def image_folder(folder: str | Path, split: str, seed: int) -> ImageTask:
    """The images as they are: no crops, no flips, normalized by the training images' statistics."""
    path = Path(folder) / FILE
    try:
        with np.load(path) as arrays:
            held = {name: arrays[name] for name in arrays.files}
        images, test_images = (_images(held[f"{part}_images"]) for part in ("train", "test"))
        labels, test_labels = (_labels(held[f"{part}_labels"]) for part in ("train", "test"))
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"cannot read {path}: {error}", hint=_HINT) from None
    _check(path, images, labels, test_images, test_labels)
    values = images.double().div_(255).transpose(0, 1).flatten(1)
    task = ImageTask(
        name=Path(folder).resolve().name,
        split="test",
        images=images,
        labels=labels,
        held_out_images=test_images,
        held_out_labels=test_labels,
        classes=int(torch.cat([labels, test_labels]).max()) + 1,
        mean=tuple(values.mean(1).tolist()),
        deviation=tuple(values.std(1).clamp_(min=1 / 255).tolist()),
        padding=0,
        flip=False,
    )
    if split == "test":
        return task
    return task.with_validation(max(len(images) // VALIDATION_PART, 1), seed)


def _images(array: np.ndarray) -> Tensor:
    if array.dtype != np.uint8 or array.ndim not in (3, 4) or 0 in array.shape:
        raise ValueError(f"images are {array.dtype} of shape {array.shape}")
    return torch.from_numpy(array if array.ndim == 4 else array[:, None])


def _labels(array: np.ndarray) -> Tensor:
    if array.dtype.kind not in "iu" or array.ndim != 1 or array.min(initial=0) < 0:
        raise ValueError(f"labels are {array.dtype} of shape {array.shape}")
    return torch.from_numpy(array.astype(np.int64))


def _check(
    path: Path, images: Tensor, labels: Tensor, test_images: Tensor, test_labels: Tensor
) -> None:
    if (len(images), len(test_images)) != (len(labels), len(test_labels)):
        raise InputError(f"{path} does not have one label for each image", hint=_HINT)
    if images.shape[1:] != test_images.shape[1:]:
        shapes = [tuple(t.shape[1:]) for t in (images, test_images)]
        raise InputError(f"{path} has images of two shapes: {shapes[0]} and {shapes[1]}")
