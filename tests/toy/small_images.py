"""Another technique that somebody else wrote, of another kind: images of a lower resolution."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F

from shoestring.errors import InputError
from shoestring.techniques.base import Flag, Setup, Technique
from shoestring.techniques.claims import Circumstances, Claim, Level
from shoestring.techniques.offers import Context, Offer


@dataclass(frozen=True)
class SmallImages(Technique):
    """Train on the averages of `factor` × `factor` pixels."""

    name: ClassVar[str] = "small_images"
    order: ClassVar[int] = 41
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag("shrink", "factor", int, "Average so many pixels each way.", neutral=1),
    )
    changes_update: ClassVar[bool] = False
    changes_passes: ClassVar[bool] = True

    factor: int

    def __post_init__(self) -> None:
        if type(self.factor) is not int or self.factor < 1:
            raise InputError(f"factor {self.factor!r} is not a whole number from 1", hint="2")

    @property
    def is_neutral(self) -> bool:
        return self.factor == 1

    def short(self) -> str:
        return f"images / {self.factor}"

    def prepare(self, batch: Any) -> Any:
        images, *others = batch if isinstance(batch, (tuple, list)) else (batch,)
        if self.is_neutral:
            return batch
        images = F.avg_pool2d(images, self.factor)
        return (images, *others) if isinstance(batch, (tuple, list)) else images

    def apply(self, setup: Setup) -> None:
        run = setup.run
        setup.run = lambda batch: run(self.prepare(batch))

    def claims(self, at: Circumstances) -> Iterable[Claim]:
        if not self.is_neutral:
            yield Claim(Level.LOSSY, "images of a lower resolution")

    @classmethod
    def offers(cls, context: Context) -> Iterable[Offer]:
        yield Offer(cls(2), "images of a lower resolution", lossiness=1.0)
