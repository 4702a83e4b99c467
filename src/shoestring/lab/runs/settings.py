"""Settings: all that decides what a run computes; a resumed run must have the same."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...errors import InputError
from ..models import builtin
from ...techniques.plan import Plan
from ..target import build
from ..tasks import ImageTask
from ...trace.failures import check_trainable
from ...trace.tracing import Loss
from .defaults import (Multipliers, base_name, learning_rate_at, defaults_for, rewiring_schedule)


def check_seed(seed: int) -> None:
    """InputError for what no generator of random numbers takes."""
    if not 0 <= seed < 2**63:
        raise InputError(f"seed {seed} is not a whole number from 0")


class AnySettings:
    """Settings that all kinds of data share."""

    model: str
    data: str
    split: str
    plan: Plan
    batch: int
    seed: int
    learning_rate: float
    evaluate_every: int
    channels_last: bool

    def check_counts(self, *names: str) -> None:
        """InputError for a count below 1, a seed or a learning rate that cannot be."""
        for name in names:
            if getattr(self, name) < 1:
                told = f"{name.replace('_', ' ')} {getattr(self, name)}"
                raise InputError(f"{told} is below 1", hint="a whole number from 1")
        check_seed(self.seed)
        if not 0 < self.learning_rate < math.inf:
            raise InputError(f"learning rate {self.learning_rate:g} is not above 0, and finite")

    def check_at_once(self, size: int | None, unit: str) -> None:
        """InputError where more is to run at once than a minibatch has: nothing would be cut."""
        if size is not None and size > self.batch:
            raise InputError(
                f"a batch of {self.batch} {unit} has no microbatches of {size}",
                hint=f"a --microbatch up to {self.batch}, or a larger --batch",
            )

    def steps_per_epoch(self, task: Any) -> int:
        """Minibatches of all there is to train on."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        """Plain values, the same after a round through JSON."""
        values = asdict(self)  # type: ignore[call-overload]
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
        return {**plain, "plan": self.plan.to_dict()}

    def check_same(self, other: dict[str, Any]) -> None:
        """InputError if a run that began with `other` cannot go on with these."""
        mine = self.as_dict()
        for name in {**mine, **other}:
            if mine.get(name) != other.get(name):
                hint = "resume with the settings it began with, or start in another folder"
                if name == "plan":  # earlier versions made others of the same flags
                    hint = "write settings.plan of its records' first line to plan.json, and give "
                    hint += "--plan plan.json in place of technique flags"
                raise InputError(
                    f"the run has {name.replace('_', ' ')} {other.get(name)}, not {mine.get(name)}",
                    hint=hint,
                )


@dataclass(frozen=True)
class ImageSettings(AnySettings):
    """A model, its data, how it is trained, and under which plan."""

    model: str
    data: str
    plan: Plan
    epochs: int
    batch: int
    learning_rate: float
    """Of the first epochs."""
    drops: tuple[float, ...]
    drop_factor: float
    momentum: float
    weight_decay: float
    split: str = "test"
    seed: int = 0
    evaluate_every: int = 1
    """Epochs; the last one is always evaluated."""
    evaluation_batch: int = 1000
    channels_last: bool = False
    tf32: bool = False
    input: str | None = None
    """Shape that images are brought to, "1x28x28"; None leaves them as they are."""

    def __post_init__(self) -> None:
        self.check_counts("epochs", "batch", "evaluate_every", "evaluation_batch")
        self.check_at_once(self.plan.at_once, "images")

    def learning_rate_at(self, epoch: int) -> float:
        """Of an epoch counted from 0."""
        return learning_rate_at(
            epoch, self.epochs, self.learning_rate, self.drops, self.drop_factor
        )

    def steps_per_epoch(self, task: ImageTask) -> int:
        """Minibatches of all training images."""
        return len(task.images) // self.batch


def settings_for(
    model: str,
    data: str,
    *,
    images: int,
    plan: Plan,
    tune: bool = False,
    epochs: int | None = None,
    batch: int | None = None,
    learning_rate: float | None = None,
    seed: int = 0,
    **others: Any,
) -> ImageSettings:
    """Fill in what is not given from the defaults of the data: report, Appendix A.

    The learning rate is the one the report tuned for the density. With `tune` the plan gets the
    rewiring it tuned, over the run's number of updates, and the run's seed; otherwise it is taken
    as it is. `images` is the number there is to train on.
    """
    defaults = defaults_for(data)
    epochs = defaults.epochs if epochs is None else epochs
    batch = defaults.batch if batch is None else batch
    multipliers = defaults.multipliers(base_name(model), density_of(plan))
    if tune:
        updates, usual = (n * (images // max(batch, 1)) for n in (epochs, defaults.epochs))
        plan = tuned(plan, multipliers, updates, usual, seed)
    if learning_rate is None:
        learning_rate = defaults.learning_rate * multipliers.learning_rate
    return ImageSettings(
        model=model,
        data=data,
        plan=plan,
        epochs=epochs,
        batch=batch,
        learning_rate=learning_rate,
        drops=defaults.drops,
        drop_factor=defaults.drop_factor,
        momentum=defaults.momentum,
        weight_decay=defaults.weight_decay,
        seed=seed,
        **others,
    )


def density_of(plan: Plan) -> float:
    """By which the report tuned its learning rates."""
    return 1.0 if plan.sparsity is None else plan.sparsity.density


def tuned(plan: Plan, multipliers: Multipliers, updates: int, usual: int, seed: int) -> Plan:
    """The same techniques with the run's seed, and rewiring as the report tuned it.

    `usual` is how many updates a run on these data has where it is not cut short.
    """
    changes: dict[str, Any] = {
        f"{t.name}.seed": seed for t in plan.techniques if "seed" in t.defaults()
    }
    if plan.sparsity is not None:
        if updates < usual and not plan.sparsity.is_neutral:
            print(
                f"rewiring: {updates:,} of the usual {usual:,} updates, so it happens "
                f"{usual / max(updates, 1):.3g} times as often",
                file=sys.stderr,
            )
        changes |= {
            "sparsity.fraction_multiplier": multipliers.rewire_fraction,
            "sparsity.frequency_multiplier": multipliers.rewire_frequency,
            "sparsity.schedule": rewiring_schedule(updates, usual),
        }
    return plan.changed(changes)


def build_model(name: str, classes: int, channels: int = 3) -> tuple[nn.Module, Loss]:
    """The model a run trains on images, and its loss, on the CPU; the caller seeds."""
    if ":" in name:
        model = build(name, classes=classes, channels=channels)
        check_trainable(model)
        return model, _loss_over(name, classes)
    known = builtin(name)
    if known.batch_unit != "images":
        raise InputError(f"{name} does not take images", hint="such as wrn-28-2")
    if channels != 3:
        raise InputError(
            f"{name} takes images of 3 channels, not {channels}",
            hint="--input 3x32x32 repeats or averages them; or a model of yours",
        )
    return known.build(num_classes=classes), known.loss


def _loss_over(name: str, classes: int) -> Loss:
    """Mean cross-entropy; a model of somebody's own may have other outputs than scores."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        scores = model(images)
        shape = tuple(getattr(scores, "shape", ()))
        if len(shape) != 2 or shape[1] < classes:
            made = f"a tensor of shape {shape}" if shape else f"a {type(scores).__name__}"
            raise InputError(
                f"{name} makes {made} of {len(images)} images in {classes} classes",
                hint=f"its outputs must be scores, {len(images)} × {classes}",
            )
        return F.cross_entropy(scores, labels)

    return loss
