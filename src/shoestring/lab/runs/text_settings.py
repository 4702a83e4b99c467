"""Settings of a run on text: updates, tokens, and how translations are made in the end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..decoding.beam import BeamSearch
from ...errors import InputError
from ...techniques.plan import Plan
from ..tasks import TextTask
from ..tasks.token_batches import TextFeed
from .defaults import inverse_square_root, translation_multipliers, translation_defaults
from .settings import AnySettings, density_of, tuned


@dataclass(frozen=True)
class TextSettings(AnySettings):
    """A translation model, its text, how it is trained, and under which plan."""

    model: str
    data: str
    plan: Plan
    updates: int
    batch: int
    """Tokens of a minibatch on each side, padding counted."""
    learning_rate: float
    """The largest, after the warm-up."""
    first_learning_rate: float
    warmup_updates: int
    betas: tuple[float, float]
    weight_decay: float
    dropout: float
    average: int
    """Weights of the ends of so many last epochs are averaged; 1 or 0 takes the last as it is."""
    beam: int
    length_penalty: float
    split: str = "test"
    seed: int = 0
    evaluate_every: int = 1
    """Epochs; after the last update it is evaluated in any case."""
    evaluation_batch: int = 4000
    """Tokens."""
    tf32: bool = False

    channels_last = False

    def __post_init__(self) -> None:
        self.check_counts("updates", "batch", "evaluate_every", "evaluation_batch")
        self.check_at_once(self.plan.tokens_at_once, "tokens")
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout {self.dropout:g} is not in [0, 1)")
        if self.warmup_updates < 0 or self.average < 0:
            raise InputError("warm-up and average count from 0")
        BeamSearch(self.beam, self.length_penalty)

    @property
    def search(self) -> BeamSearch:
        """How translations are looked for."""
        return BeamSearch(self.beam, self.length_penalty)

    def learning_rate_at(self, update: int) -> float:
        """Of an update counted from 0."""
        return inverse_square_root(
            update + 1, self.learning_rate, self.first_learning_rate, self.warmup_updates
        )

    def steps_per_epoch(self, task: TextTask) -> int:
        """Minibatches of the whole text."""
        return TextFeed(task, self.batch, seed=0, device=torch.device("cpu")).steps_per_epoch


def text_settings_for(
    model: str,
    data: str,
    task: TextTask,
    *,
    plan: Plan,
    tune: bool = False,
    updates: int | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    learning_rate: float | None = None,
    warmup: int | None = None,
    dropout: float | None = None,
    average: int | None = None,
    beam: int | None = None,
    length_penalty: float | None = None,
    seed: int = 0,
    **others: Any,
) -> TextSettings:
    """Fill in what is not given from the defaults of the data.

    As for images: the learning rate is the one the report tuned for the density or the model, and
    with `tune` so is the plan's rewiring. A plan's microbatches count tokens.
    """
    if updates is not None and epochs is not None:
        raise InputError("--updates and --epochs are both given", hint="keep one of them")
    defaults = translation_defaults(task.name)
    multipliers = translation_multipliers(model, density_of(plan))
    settings = TextSettings(
        model=model,
        data=data,
        plan=plan,
        updates=defaults.updates if updates is None else updates,
        batch=defaults.batch_tokens if batch is None else batch,
        learning_rate=(
            defaults.learning_rate * multipliers.learning_rate
            if learning_rate is None
            else learning_rate
        ),
        first_learning_rate=defaults.first_learning_rate,
        warmup_updates=defaults.warmup_updates if warmup is None else warmup,
        betas=defaults.betas,
        weight_decay=defaults.weight_decay,
        dropout=defaults.dropout if dropout is None else dropout,
        average=defaults.average if average is None else average,
        beam=defaults.beam if beam is None else beam,
        length_penalty=defaults.length_penalty if length_penalty is None else length_penalty,
        seed=seed,
        **others,
    )
    if epochs is not None:
        settings = replace(settings, updates=epochs * settings.steps_per_epoch(task))
    if tune:
        plan = tuned(plan, multipliers, settings.updates, defaults.updates, seed)
        settings = replace(settings, plan=plan)
    return settings
