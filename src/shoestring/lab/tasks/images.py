"""Images to train on, and their way to the device: order, crops and flips from (seed, epoch)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from subprocess import SubprocessError
from types import ModuleType
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import InputError
from ...kernels import has_triton

Batch = tuple[Tensor, Tensor]

DEVICE_LIMIT_BYTES = 2 * 10**9
"""A larger data set stays on the host, and its batches are sent one by one."""
DEVICES = ("cuda",)
"""Where Triton's kernels run."""


@dataclass(frozen=True)
class ImageTask:
    """Labelled 8-bit images, of shape (n, channels, height, width), on the host."""

    name: str
    split: str
    """The name of the second set: test or validation."""
    images: Tensor
    labels: Tensor
    held_out_images: Tensor
    held_out_labels: Tensor
    classes: int
    mean: tuple[float, ...]
    """Of each channel, of numbers in [0, 1]."""
    deviation: tuple[float, ...]
    padding: int
    """A crop of the original size is drawn from the image with so many black pixels around it."""
    flip: bool
    """Half of the images are mirrored, left to right."""

    unit: ClassVar[str] = "examples"
    """The unit of a minibatch's size."""
    threads: ClassVar[int | None] = None
    """Of the CPU, where a number suits the data; None is PyTorch's."""
    remarks: ClassVar[tuple[str, ...]] = ()
    """A note on unusable data, for people."""
    written_in_place: ClassVar[bool] = True
    """On CUDA every batch is written over the last one, so a captured step needs no copy of it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image: channels, height, width."""
        return tuple(self.images.shape[1:])

    @property
    def data_bytes(self) -> int:
        """Of all images and labels."""
        tensors = (self.images, self.labels, self.held_out_images, self.held_out_labels)
        return sum(t.numel() * t.element_size() for t in tensors)

    def with_validation(self, count: int, seed: int) -> ImageTask:
        """The same task with `count` training images, drawn by `seed`, held out in place of test's.

        The rest stays in its order.
        """
        drawn = torch.randperm(len(self.images), generator=_generator(seed, _SPLIT))
        held_out, left = drawn[:count].sort().values, drawn[count:].sort().values
        return replace(
            self,
            split="validation",
            images=self.images[left],
            labels=self.labels[left],
            held_out_images=self.images[held_out],
            held_out_labels=self.labels[held_out],
        )

    def resized(self, shape: tuple[int, ...]) -> ImageTask:
        """The same images with other heights and widths, in color or in gray."""
        if shape == self.shape:
            return self
        if len(shape) != 3 or shape[0] not in (self.shape[0], 1, 3) or self.shape[0] not in (1, 3):
            raise InputError(
                f"{self.name} has images of {'x'.join(map(str, self.shape))}, which cannot become "
                f"{'x'.join(map(str, shape))}",
                hint="--input CHANNELSxHEIGHTxWIDTH with 1 or 3 channels",
            )
        gray = shape[0] < self.shape[0]
        mean, deviation = (
            (sum(each) / len(each),) if gray else (each * shape[0])[: shape[0]]
            for each in (self.mean, self.deviation)
        )
        return replace(
            self,
            images=_resized(self.images, shape),
            held_out_images=_resized(self.held_out_images, shape),
            mean=mean,
            deviation=deviation,
            padding=round(self.padding * shape[1] / self.shape[1]),
        )


def image_shape(text: str) -> tuple[int, ...]:
    """'1x28x28' → (1, 28, 28)."""
    parts = text.strip().split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise InputError(
            f"cannot read the shape of an image {text!r}",
            hint="CHANNELSxHEIGHTxWIDTH of one image, such as 1x28x28",
        )
    return tuple(int(part) for part in parts)


def _resized(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A part at a time, since numbers in between take four bytes."""
    made = torch.empty((len(images), *shape), dtype=torch.uint8)
    for part, out in zip(images.split(1000), made.split(1000), strict=True):
        wide = part.float()
        if shape[0] < wide.shape[1]:
            wide = wide.mean(1, keepdim=True)
        if wide.shape[2:] != shape[1:]:
            wide = F.interpolate(wide, shape[1:], mode="bilinear", antialias=True)
        out.copy_(wide.round_().clamp_(0, 255).expand(-1, shape[0], -1, -1))
    return made


_SPLIT, _ORDER = 1, 2
"""The uses of a seed, so that no two uses draw the same numbers."""


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _generator(seed: int, *purpose: int) -> torch.Generator:
    """A stream on the CPU that depends on nothing but these numbers."""
    state = np.random.SeedSequence([seed, *purpose]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0] >> np.uint64(1)))


class ImageFeed:
    """Batches of a task on a device: gathered, cropped, mirrored and normalized there.

    Every epoch draws its order, crops and flips on the CPU from (seed, epoch) alone: any batch of
    any epoch can be reproduced, on any device. An epoch leaves out what does not fill a last
    batch, other images each time, so that every batch has the same shape. With a `share`, of each
    batch only those examples (from, to) are made: the part of one rank among several. `in_place`
    writes every batch over the last one.
    """

    def __init__(
        self,
        task: ImageTask,
        batch: int,
        *,
        seed: int,
        share: tuple[int, int] | None = None,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
        in_place: bool = False,
        device_limit_bytes: int = DEVICE_LIMIT_BYTES,
    ) -> None:
        if not 1 <= batch <= len(task.images):
            raise InputError(
                f"a batch of {batch} from {len(task.images):,} training images",
                hint=f"from 1 to {len(task.images):,}",
            )
        self.task, self.batch_size, self.seed, self.device = task, batch, seed, device
        self.steps_per_epoch = len(task.images) // batch
        self.share = share or (0, batch)
        self.streams = device.type != "cpu" and task.data_bytes > device_limit_bytes
        """Whether the data stays on the host."""
        home = torch.device("cpu") if self.streams else device
        before = _allocated(home)
        self._images, self._labels = task.images.to(home), task.labels.to(home)
        self._held_out = task.held_out_images.to(home), task.held_out_labels.to(home)
        self.resident_bytes = _allocated(home) - before
        """Of the data set, on the device, the whole time: its blocks, which are larger than it."""
        self._dtype, self._last = dtype, channels_last
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        deviation = torch.tensor(task.deviation, device=device).view(1, -1, 1, 1)
        self._scale = 1 / (255 * deviation)
        self._shift = -torch.tensor(task.mean, device=device).view(1, -1, 1, 1) / deviation
        self._kernels = _kernels() if device.type in DEVICES else None
        self.in_place = in_place
        self._made: Batch | None = None
        self._epoch: int | None = None

    def _start(self, epoch: int) -> None:
        """Draw what an epoch needs: of each of its images which it is, and where the crop starts.

        A column of a mirrored one is counted on from the last.
        """
        count, crops = len(self.task.images), 2 * self.task.padding + 1
        generator = _generator(self.seed, _ORDER, epoch)
        order = torch.randperm(count, generator=generator)
        rows = torch.randint(crops, (count,), generator=generator)
        columns = torch.randint(crops, (count,), generator=generator)
        if self.task.flip:
            columns += crops * torch.randint(2, (count,), generator=generator)
        drawn = torch.stack([order, rows, columns], 1).to(torch.int32)
        self._drawn = drawn.pin_memory() if self.device.type == "cuda" else drawn
        self._epoch = epoch

    def batch(self, epoch: int, number: int) -> Batch:
        """Batch `number` of an epoch, both counted from 0."""
        if epoch != self._epoch:
            self._start(epoch)
        part = slice(*(number * self.batch_size + place for place in self.share))
        here = self._drawn[part]
        drawn = here.to(self.device, non_blocking=True)
        chosen = (here if self.streams else drawn)[:, 0].contiguous()
        labels = self._sent(self._labels.index_select(0, chosen))
        if self._made is None:
            shape = (len(here), *self._images.shape[1:])
            images = torch.empty(
                shape, dtype=self._dtype, device=self.device, memory_format=self._format
            )
        else:
            images, held = self._made
            labels = held.copy_(labels)
        pixels = self._sent(self._images.index_select(0, chosen)) if self.streams else self._images
        if not self._by_kernel(pixels, drawn, images):
            pixels = pixels if self.streams else pixels.index_select(0, chosen)
            images.copy_(self._normalized(self._cropped(pixels, drawn)))
        if self.in_place:
            self._made = images, labels
        return images, labels

    def _by_kernel(self, images: Tensor, drawn: Tensor, out: Tensor) -> bool:
        """Whether a kernel made the crops, and will."""
        if self._kernels is None:
            return False
        try:
            self._kernels.crop(
                images, drawn, self._scale, self._shift, self.task.padding, out,
                chosen=not self.streams, channels_last=self._last,
            )  # fmt: skip
        except (RuntimeError, OSError, SubprocessError) as error:  # no compiler, or no headers
            self._kernels = None
            why = str(error).partition("\n")[0]
            warnings.warn(
                f"Triton cannot make minibatches here ({why}); PyTorch does, in some more memory",
                RuntimeWarning,
                stacklevel=3,
            )
        return self._kernels is not None

    def _cropped(self, images: Tensor, drawn: Tensor) -> Tensor:
        """Through one table of positions for all channels.

        To index every dimension would copy a table of 64 bits for each, as large as the images.
        """
        padding, (height, width) = self.task.padding, images.shape[2:]
        _, row, column = drawn.long().unbind(1)
        across = torch.arange(width, device=images.device)
        mirrored = column > 2 * padding
        columns = torch.where(mirrored[:, None], across.flip(0), across)
        columns = columns + (column - mirrored * (2 * padding + 1))[:, None]
        rows = row[:, None] + torch.arange(height, device=images.device)
        places = (rows * (width + 2 * padding))[:, :, None] + columns[:, None, :]
        pixels = F.pad(images, (padding,) * 4).flatten(2)
        places = places.flatten(1)[:, None].expand(-1, pixels.shape[1], -1)
        return pixels.gather(2, places).view(*images.shape)

    def held_out(self, batch: int) -> Iterator[Batch]:
        """The images to evaluate on, as they are, in batches of at most `batch`."""
        for images, labels in zip(*(t.split(batch) for t in self._held_out), strict=True):
            wide = self._normalized(self._sent(images))
            yield wide.to(self._dtype, memory_format=self._format), self._sent(labels)

    def _normalized(self, images: Tensor) -> Tensor:
        wide = images.to(torch.float32, copy=True)
        return torch.addcmul(self._shift, wide, self._scale, out=wide)

    def _sent(self, tensor: Tensor) -> Tensor:
        if not self.streams:
            return tensor
        # Pinned memory is used again only when the copy is done: the allocator sees to that.
        return tensor.pin_memory().to(self.device, non_blocking=True)


def _kernels() -> ModuleType | None:
    """Triton's, where it is installed."""
    if not has_triton():
        return None
    from ...kernels import images as image_kernels

    return image_kernels
