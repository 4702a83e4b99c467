"""The report's hyperparameters as data: its tables of Appendix A, and how they scale.

Where the tables are at odds with the text or with their source, the entry says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ...errors import InputError
from ...techniques.sparsity import REPORT_SCHEDULE
from ..tasks.image_folder import is_image_folder

Schedule = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Multipliers:
    """The tuned values of one setting, relative to the defaults of its experiment."""

    learning_rate: float
    rewire_fraction: float = 1.0
    rewire_frequency: float = 1.0


@dataclass(frozen=True)
class ImageDefaults:
    """How a task is trained by default."""

    epochs: int
    batch: int
    learning_rate: float
    drops: tuple[float, ...]
    """After these parts of the epochs the learning rate is multiplied by `drop_factor`."""
    drop_factor: float
    momentum: float
    weight_decay: float
    by_density: dict[float, Multipliers]
    """For the base model; density 1 has no rewiring."""
    by_model: dict[str, Multipliers]
    """For other architectures, dense."""

    def multipliers(self, model: str, density: float) -> Multipliers:
        """Of the nearest setting the report tuned: the model where it is dense, else the density.

        A density between two takes the smaller one's.
        """
        if density == 1:
            return self.by_model.get(model, self.by_density.get(1.0, Multipliers(1.0)))
        below = [d for d in self.by_density if d <= density + 1e-9]
        known = max(below) if below else min(self.by_density, default=1.0)
        return self.by_density.get(known, Multipliers(1.0))


CIFAR10 = ImageDefaults(
    epochs=200,
    batch=100,
    learning_rate=0.1,
    # Epochs 60, 120 and 160 of 200: 0.1, 0.02, 0.004, 0.0008. The table prints 0.040 and 0.008
    # for the last two, which would be a rise after a fall: a slip.
    drops=(0.3, 0.6, 0.8),
    drop_factor=0.2,
    momentum=0.9,
    weight_decay=5e-4,
    by_density={
        1.0: Multipliers(0.5),
        0.5: Multipliers(0.5, 4, 0.5),
        0.4: Multipliers(1, 1, 2),
        0.3: Multipliers(1, 2, 0.5),
        0.2: Multipliers(1, 2, 1),
        0.1: Multipliers(0.5, 1, 0.5),
        0.05: Multipliers(0.5, 1, 0.25),
    },
    by_model={
        **{f"wrn-{depth}-2": Multipliers(0.5) for depth in (22, 16, 10)},
        **{f"wrn-28-{width}": Multipliers(0.5) for width in ("1.5", "1", "0.75")},
        "wrn-28-0.5": Multipliers(1),
    },
)

DIGITS = ImageDefaults(
    epochs=20,
    batch=100,
    learning_rate=0.4,
    drops=(0.6, 0.85),
    drop_factor=0.2,
    momentum=0.9,
    weight_decay=5e-4,
    by_density={},
    by_model={},
)
"""Our own, for the few updates that 1,438 images give: the report has no such task."""

OTHER_IMAGES = replace(DIGITS, learning_rate=0.1)
"""For images of one's own, of which nothing is known."""

IMAGE_DEFAULTS = {"cifar10": CIFAR10, "digits": DIGITS}

REPORT_UPDATES = 100_000
"""The training that `REPORT_SCHEDULE` of rewiring is for."""


@dataclass(frozen=True)
class TranslationDefaults:
    """DC-Transformer on IWSLT'14: Adam, and the inverse square root of the update."""

    updates: int = 50_000
    batch_tokens: int = 4_000
    learning_rate: float = 5e-4
    first_learning_rate: float = 1e-7
    warmup_updates: int = 4_000
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 1e-4
    dropout: float = 0.3
    average: int = 10
    """Ends of the last epochs."""
    beam: int = 4
    length_penalty: float = 1.0

    def learning_rate_at(self, update: int) -> float:
        """Of update n from 1."""
        return inverse_square_root(
            update, self.learning_rate, self.first_learning_rate, self.warmup_updates
        )


def inverse_square_root(update: int, top: float, first: float, warmup: int) -> float:
    """1e-7 + (5e-4 − 1e-7) n / 4000, then 5e-4 sqrt(4000 / n), for update n from 1."""
    if update <= warmup:
        return first + (top - first) * update / warmup
    return top * (max(warmup, 1) / update) ** 0.5


TRANSLATION = TranslationDefaults()
NUMBER_WORDS = TranslationDefaults(
    updates=340,
    batch_tokens=2_000,
    learning_rate=3e-3,
    warmup_updates=60,
    dropout=0.1,
    average=4,
)
"""Our own, for `dc-transformer-tiny`: eight epochs, half a minute on one core."""
TRANSLATION_BY_DENSITY = {
    1.0: Multipliers(1),
    0.5: Multipliers(2, 4, 0.125),
    0.4: Multipliers(2, 4, 0.125),
    0.3: Multipliers(4, 4, 0.125),
    0.2: Multipliers(4, 2, 0.25),
    0.1: Multipliers(8, 1, 0.5),
    0.05: Multipliers(8, 0.5, 0.5),
}
TRANSLATION_BY_MODEL = {
    "dc-transformer-decoder-3": Multipliers(1),
    "dc-transformer-decoder-1": Multipliers(2),
    "dc-transformer-width-384": Multipliers(1),
    "dc-transformer-width-256": Multipliers(2),
    "dc-transformer-width-192": Multipliers(2),
    "dc-transformer-width-128": Multipliers(4),
}


def learning_rate_at(
    epoch: int, epochs: int, first: float, drops: tuple[float, ...], factor: float
) -> float:
    """Of an epoch counted from 0: multiplied by `factor` after each of the parts in `drops`."""
    return first * factor ** sum(epoch >= round(part * epochs) for part in drops)


def rewiring_schedule(updates: int, usual: int) -> Schedule:
    """The report's periods of rewiring, made shorter or longer for a run of so many updates.

    As the report does for translation the periods scale, and how often they rewire does not:
    every 100 updates, for a run as long as is `usual` for the data. A run that is cut short
    rewires more often, in proportion, or it would end after fewer rewirings: a part of the
    recipe. Periods that would have no update are left out.
    """
    share = min(1.0, updates / max(usual, 1))
    scaled: list[tuple[int, int]] = []
    for last, every in REPORT_SCHEDULE:
        end = last * updates // REPORT_UPDATES
        if end > (scaled[-1][0] if scaled else 0):
            scaled.append((end, max(1, round(every * share))))
    return tuple(scaled)


def translation_defaults(data: str) -> TranslationDefaults:
    """By the name of the text; IWSLT'14's for all but number words."""
    return NUMBER_WORDS if data == "number_words" else TRANSLATION


def translation_multipliers(model: str, density: float) -> Multipliers:
    """As `Recipe.multipliers`, from the report's tables for DC-Transformer."""
    if density == 1:
        return TRANSLATION_BY_MODEL.get(model, TRANSLATION_BY_DENSITY[1.0])
    below = [d for d in TRANSLATION_BY_DENSITY if d <= density + 1e-9]
    return TRANSLATION_BY_DENSITY[max(below, default=min(TRANSLATION_BY_DENSITY))]


def defaults_for(data: str) -> ImageDefaults:
    """By the name of the data."""
    if is_image_folder(data):
        return OTHER_IMAGES
    if data not in IMAGE_DEFAULTS:
        raise InputError(f"no data is called {data!r}", hint="one of " + ", ".join(IMAGE_DEFAULTS))
    return IMAGE_DEFAULTS[data]


def usual_batch(data: str, model: str) -> int | None:
    """Of a minibatch where none is asked for; None for data of which nothing is known."""
    if data in IMAGE_DEFAULTS:
        return IMAGE_DEFAULTS[data].batch
    return translation_defaults(data).batch_tokens if model.startswith("dc-transformer") else None


def base_name(model: str) -> str:
    """Without the kind of shortcut, which the report does not vary."""
    return re.sub(r"-pool$", "", model)
