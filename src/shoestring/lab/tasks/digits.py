"""Handwritten digits that come with scikit-learn: 1,797 images of 8×8, there without a download."""

from __future__ import annotations

import numpy as np
import torch

from ...errors import needs_extra
from .images import ImageTask

SIDE = 32
"""Pixels are repeated, and the channel too, to the size of CIFAR-10's images: the same models,
and the same predictions of their memory, fit both."""
TEST_EVERY = 5
VALIDATION_IMAGES = 144


def digits(split: str, seed: int) -> ImageTask:
    """Every fifth image is for the test (359), whatever the seed; the others are to train on."""
    with needs_extra("lab", "scikit-learn", "the data set digits"):
        from sklearn.datasets import load_digits
    data = load_digits()
    gray = np.rint(data.images * (255 / 16)).astype(np.uint8)
    large = gray.repeat(SIDE // 8, axis=1).repeat(SIDE // 8, axis=2)
    images = torch.from_numpy(np.stack([large] * 3, axis=1))
    labels = torch.from_numpy(data.target.astype(np.int64))
    test = torch.arange(len(images)) % TEST_EVERY == TEST_EVERY - 1
    shown = images[~test].double() / 255
    task = ImageTask(
        name="digits",
        split="test",
        images=images[~test],
        labels=labels[~test],
        held_out_images=images[test],
        held_out_labels=labels[test],
        classes=10,
        mean=(float(shown.mean()),) * 3,
        deviation=(float(shown.std()),) * 3,
        padding=2,  # half a pixel of the original
        flip=False,
    )
    return task if split == "test" else task.with_validation(VALIDATION_IMAGES, seed)
