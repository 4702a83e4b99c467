"""Planned and plain training of copies, each as it is and in FP64: all that a proof compares.

    plain    model, optimizer, loss as they are       → expected
             the same in FP64                         → exact; expected - exact is the noise
    planned  the same, with the plan                  → found

Further sides are made on request: the plan in FP64, and a plain loop over the plan's parts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import InputError, NoEffectWarning, TraceError
from ..techniques.claims import Circumstances
from ..techniques.distance import RoundingNoise
from ..techniques.plan import Plan
from ..techniques.splitting import SplitFound
from ..techniques.splitting.find import find_units
from ..techniques.splitting.units import AUTO
from ..trace.blocks import is_normalization
from ..trace.split import examples_of
from ..trace.tracing import Loss
from .floats import computed_kinds
from .noise import noises
from .other import Against, carried_over
from .sides import InParts, Optimizer, Plain, Planned, Trained

_ASSUMED = {
    torch.float64: 1e-13,
    torch.float32: 2e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 8e-3,
}
"""Rounding where it cannot be measured, relative, by the least precise type computed in."""


class Pair:
    """Both sides, trained on the same data with the same draws."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        data: list[Any],
        rewind: Callable[[], None],
        against: Against | None,
    ) -> None:
        self.data, self.against, self.rewind = data, against, rewind
        self.own = (model, optimizer, loss)
        self.trained = self.own if against is None else carried_over(against, *self.own)
        """The plain side's: the user's own, or the other one it is compared with."""
        self.plain = Plain(*self.trained)
        self.expected = self.plain.train(data)
        self.split: SplitFound | None = None
        self.plan = self._with_units(plan)
        self.at = self._circumstances()
        self.planned, self.found = self._train_planned()
        self.exact = self.exactly(lambda: self.like_plain(wide=True))
        self.noise = self._measured()

    def _with_units(self, plan: Plan) -> Plan:
        """With units that were tested, where the plan leaves them open."""
        cut = next((batch for batch in self.data if runs_in_parts(plan, batch)), None)
        if plan.loss_units != AUTO or cut is None:
            return plan
        model, _, loss = self.own
        self.split = find_units(model, cut, loss)
        units = "examples" if self.split.units == AUTO else self.split.units
        return Plan(technique.weighted(units) for technique in plan.techniques)

    def _circumstances(self) -> Circumstances:
        model, optimizer, _ = self.own
        streams = self.expected.streams
        return Circumstances(
            device=next(model.parameters()).device.type,
            batch_norm=any(is_normalization(m) and m.training for m in model.modules()),
            drawn=any(state != streams[0] for state in streams),
            split=any(is_cut(self.plan, batch) for batch in self.data),
            linear=isinstance(optimizer, torch.optim.SGD),
        )

    def make_planned(self, plan: Plan, *, wide: bool = False) -> Planned:
        """A side with a plan, not trained yet."""
        self.rewind()
        made = Planned(plan, *self.own, wide=wide)
        if wide or (self.at.split and self.at.drawn):
            made.share(self.expected.draws)
        return made

    def _train_planned(self) -> tuple[Planned, Trained]:
        """With a loss scale that no step overflows at, if there is one."""
        planned = self.make_planned(self.plan)
        scale = planned.scale
        for _ in range(40):
            start = None if scale is None else float(scale)
            found = planned.train(self.data)
            if start is None or planned.scale is None or float(planned.scale) >= start:
                break
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NoEffectWarning)
                planned, scale = self.make_planned(self.plan), planned.scale
            assert planned.scale is not None and scale is not None
            planned.scale.copy_(scale)
            scale = planned.scale
        return planned, found

    def like_plain(self, *, wide: bool) -> Plain:
        """Another plain side, with the draws of the first."""
        self.rewind()
        side = Plain(*self.trained, wide=wide)
        side.draws = self.expected.draws
        return side

    def in_a_loop(self, plan: Plan, *, wide: bool) -> InParts:
        """Over the parts of this plan, plainly."""
        self.rewind()
        side = InParts(*self.trained, wide=wide)
        side.plan, side.draws = plan, self.expected.draws
        return side

    def exactly(self, side: Callable[[], Plain | Planned]) -> Trained | None:
        """In FP64; None where the model or its loss does not run so."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NoEffectWarning)
                return side().train(self.data)
        except (InputError, TraceError):
            return None

    @property
    def narrow(self) -> str | None:
        """The 16-bit type the plan computes in, if it does."""
        kinds = {torch.float16: "fp16", torch.bfloat16: "bf16"}
        found = (kinds.get(t.input_dtype) for t in self.plan.techniques if t.input_dtype)
        return next((kind for kind in found if kind is not None), None)

    def train_by(self, plan: Plan) -> Any:
        """By another plan, from the same loss scale on."""
        side = self.make_planned(plan)
        if side.scale is not None:
            assert self.planned.scale is not None
            side.scale.copy_(self.planned.scale)
        return side.train(self.data)

    def _measured(self) -> dict[str, RoundingNoise]:
        if self.exact is not None:
            self.reference = "rounding measured against the same steps in FP64"
            return noises(self.exact, self.expected)
        loss = self.trained[2]
        self.rewind()
        kinds = computed_kinds(lambda: loss(Plain(*self.trained).model, self.data[0]))
        worst = max(_ASSUMED[kind] for kind in kinds & _ASSUMED.keys())
        self.reference = f"rounding assumed to be {worst:g}: the step does not run in FP64"
        return {what: RoundingNoise({}, worst) for what in self.expected.rows()}


def is_cut(plan: Plan, batch: Any) -> bool:
    """Whether examples that belong together are fewer than the batch has."""
    cuts = any(t.examples_together(batch) is not None for t in plan.techniques)
    return cuts and plan.examples_together(batch) < (examples_of(batch) or 0)


def runs_in_parts(plan: Plan, batch: Any) -> bool:
    """Whether fewer examples run at once than the batch has."""
    size = plan.examples_at_once(batch)
    return size is not None and size < (examples_of(batch) or 0)
