"""`verify`: plain and planned training side by side, on copies, with the same data and seeds."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from ..errors import InputError, NoEffectWarning
from ..memory.live.measure import measure, training_step
from ..step.apply import apply
from ..step.predict import predict_step
from ..step.step import Step
from ..step.streams import rewound, stream_states
from ..techniques.base import Technique
from ..techniques.claims import WHAT, Circumstances, Claims, Level
from ..techniques.plan import Plan
from ..trace.batches import map_tensors
from ..trace.blocks import is_normalization
from ..trace.capture import Loss, user_code
from ..trace.draws import has_random_depth
from ..trace.fakes import check_optimizer, make_optimizer, unwrapped
from ..trace.split import examples_of
from ..trace.untouched import hooks_of
from .certificate import TOLERANCES, Certificate, Comparison, compare
from .claims import claims, hidden, suspicion
from .dropout import turn_off_dropout
from .floats import computed_kinds, whole_fp32

Optimizer = torch.optim.Optimizer


def verify(
    plan: Plan | Iterable[Technique],
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Loss,
    optimizer: Optimizer,
    steps: int = 3,
) -> Certificate:
    """Train copies for a few steps, plainly and by the plan, and say how they compare.

    Gradients are those of the first step, before the update. Those of sparse tensors are compared
    at the nonzeros with the gradient of the dense model that is zero elsewhere. Everything else is
    compared after the last step. Recomputation is lossless whatever it is combined with: beside
    lossy parts it is compared with the same plan without it. Whether the loss splits into
    microbatches must show, too: beside 16 bits and where dropout draws, one step of microbatches
    alone is compared with a plain one, both without dropout. The model, the optimizer and the
    random streams given are left as they are. FP32 is whole, without TF32. With fewer batches than
    steps they are used again.
    """
    chosen = Plan.of(plan)
    check_optimizer(optimizer)
    optimizer = unwrapped(optimizer)
    data = _batches(batches, steps)
    trial = _Plain(model, optimizer, loss)
    touched = rewound([loss, *hooks_of(model)], trial.model, lambda: trial.train(data[:1]))
    with touched as rewind, ExitStack() as compared, ExitStack() as trained:
        for technique in chosen.techniques:
            compared.enter_context(technique.comparable(model))
        trained.enter_context(whole_fp32())
        plain = _Plain(model, optimizer, loss)
        expected = plain.train(data)
        kinds = plain.kinds(data[0])
        rewind()
        planned = _Planned(chosen, model, optimizer, loss)
        as_planned = _Plain(model, optimizer, loss)
        if any([meaning.prepare_plain(as_planned.named) for meaning in planned.meanings]):
            gradients = as_planned.train(data[:1]).gradients
            expected.gradients = {n: planned.expected(n, g) for n, g in gradients.items()}
            rewind()
        del as_planned
        found = planned.train(data)
        at = _circumstances(chosen, model, optimizer, data, expected)
        promised = claims(chosen, at)
        types = kinds | {p.dtype for p in planned.named.values()}
        comparisons = _compare(expected, found, promised, planned, _tolerance(types))
        for name in hidden(chosen, at, promised):
            proven = chosen.get(name)
            assert proven is not None
            if proven.proof == "alone":
                batch = next((batch for batch in data if _is_cut(chosen, batch)), data[0])
                given = proven, batch, rewind, _tolerance(kinds), model, optimizer, loss
                comparisons += (_alone(*given),)
                continue
            rewind()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NoEffectWarning)  # said once
                without = _Planned(chosen.without(name), model, optimizer, loss).train(data)
            comparisons += (_beside(proven, without, found, planned),)
        trained.close()
        there = next(model.parameters()).device.type

        def predicted_bytes() -> int:
            return predict_step(
                chosen, model, data[0], loss=loss, optimizer=optimizer, device=there
            ).peak_bytes

        predicted = predicted_bytes()
        measured = planned.step.measure(data[0])
        before = measure(plain.model, data[0], loss=loss, optimizer=plain.optimizer, warmup_steps=1)
        made = Certificate(
            chosen,
            measured.device,
            steps,
            comparisons,
            predicted,
            measured.peak_bytes,
            before.peak_bytes,
        )
        # Of a random depth the prediction is the worst draw's.
        drawn = has_random_depth(model) and measured.peak_bytes <= predicted
        return made if made.peak_ok or not drawn else replace(made, peak_varies=True)


def _batches(batches: Iterable[Any], steps: int) -> list[Any]:
    if steps < 1:
        raise InputError(f"verify cannot run {steps} steps", hint="a whole number from 1")
    if isinstance(batches, (torch.Tensor, Mapping, tuple)):
        raise InputError("batches is one batch, not several", hint="give a list, [batch]")
    given = list(islice(batches, steps))
    if not given:
        raise InputError("there is no batch to verify with", hint="give a list, [batch]")
    return [given[number % len(given)] for number in range(steps)]


def _circumstances(
    plan: Plan, model: nn.Module, optimizer: Optimizer, data: list[Any], plain: _Trained
) -> Circumstances:
    return Circumstances(
        device=next(model.parameters()).device.type,
        batch_norm=any(is_normalization(m) and m.training for m in model.modules()),
        drawn=any(state != plain.streams[0] for state in plain.streams),
        split=any(_is_cut(plan, batch) for batch in data),
        linear=isinstance(optimizer, torch.optim.SGD),
    )


def _is_cut(plan: Plan, batch: Any) -> bool:
    cuts = any(technique.examples_together(batch) is not None for technique in plan.techniques)
    return cuts and plan.examples_together(batch) < (examples_of(batch) or 0)


def _tolerance(kinds: set[torch.dtype]) -> float:
    return max(TOLERANCES[kind] for kind in kinds & TOLERANCES.keys())


@dataclass
class _Trained:
    """What a few steps leave behind."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    streams: list[Any] = field(default_factory=list)
    """Before the first step and after each."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)

    def all(self) -> dict[Any, torch.Tensor]:
        """Every tensor of it."""
        parts = dict(enumerate(self.losses)), self.gradients, self.buffers, self.parameters
        return {
            (number, key): held
            for number, part in enumerate((*parts, self.state))
            for key, held in part.items()  # type: ignore[attr-defined]
        }


class _Copy:
    """A copy of the model and its optimizer, state included, by the names it had."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, loss: Loss) -> None:
        memo: dict[int, Any] = {}
        self.model = copy.deepcopy(model, memo)
        self.loss = loss
        mapping = {id(p): memo[id(p)] for p in model.parameters()}
        made = make_optimizer(optimizer, self.model, mapping)
        assert made is not None
        self.optimizer = made
        for parameter, state in optimizer.state.items():
            made.state[mapping[id(parameter)]] = copy.deepcopy(state)
        self.named = dict(self.model.named_parameters())
        self.buffers = [name for name, _ in self.model.named_buffers()]

    def run(self, batch: Any) -> torch.Tensor:
        raise NotImplementedError

    def gradient(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.detach().clone()

    def train(self, data: list[Any]) -> _Trained:
        """A step for each batch."""
        made = _Trained(streams=[stream_states()])

        def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            made.gradients = {
                name: self.gradient(name, p.grad)
                for name, p in self.named.items()
                if p.grad is not None
            }

        handle = self.optimizer.register_step_pre_hook(note)
        for batch in data:
            with user_code():
                made.losses.append(self.run(map_tensors(torch.clone, batch)).detach().clone())
            made.streams.append(stream_states())
            handle.remove()
        buffers = dict(self.model.named_buffers())
        made.buffers = {name: buffers[name].clone() for name in self.buffers if name in buffers}
        made.parameters = {name: p.detach().clone() for name, p in self.named.items()}
        for name, p in self.named.items():
            for key, held in self.optimizer.state.get(p, {}).items():
                meant = self.meant(p, key, held) if isinstance(held, torch.Tensor) else None
                if meant is not None:
                    made.state[name, key] = meant.clone()
        return made

    def meant(self, parameter: torch.Tensor, key: str, held: torch.Tensor) -> torch.Tensor | None:
        """A state tensor as it is meant; None for one that plain training does not have."""
        return held


class _Plain(_Copy):
    """As PyTorch trains."""

    def run(self, batch: Any) -> torch.Tensor:
        return training_step(self.model, batch, self.loss, self.optimizer)

    def kinds(self, batch: Any) -> set[torch.dtype]:
        """In which the loss is computed, and the gradients with it."""
        with user_code():
            return computed_kinds(lambda: self.loss(self.model, map_tensors(torch.clone, batch)))


class _Planned(_Copy):
    """As the plan says."""

    def __init__(self, plan: Plan, model: nn.Module, optimizer: Optimizer, loss: Loss) -> None:
        super().__init__(model, optimizer, loss)
        self.step: Step = apply(plan, self.model, self.optimizer, loss=loss)
        self.meanings = self.step._setup.meanings

    def run(self, batch: Any) -> torch.Tensor:
        return self.step(batch)

    def gradient(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Without the loss scale."""
        scale = self.step.loss_scale
        return super().gradient(name, gradient if scale is None else gradient / scale)

    def meant(self, parameter: torch.Tensor, key: str, held: torch.Tensor) -> torch.Tensor | None:
        found: torch.Tensor | None = held
        for meaning in self.meanings:
            found = None if found is None else meaning.state(parameter, key, found)
        return found

    def expected(self, name: str, plain: torch.Tensor) -> torch.Tensor:
        """What a tensor of plain training is to be compared with."""
        for meaning in self.meanings:
            plain = meaning.expected(name, plain)
        return plain


def _compare(
    expected: _Trained,
    found: _Trained,
    promised: Claims,
    planned: _Planned,
    tolerance: float,
) -> tuple[Comparison, ...]:
    at = planned.expected
    moved = {name: at(name, held) for name, held in expected.parameters.items()}
    state = {key: at(key[0], held) for key, held in expected.state.items()}
    pairs: dict[str, tuple[dict[Any, Any], dict[Any, Any]]] = {
        "loss": (dict(enumerate(expected.losses)), dict(enumerate(found.losses))),
        "gradients": (expected.gradients, found.gradients),
        "buffers": (expected.buffers, found.buffers),
        "optimizer state": (state, found.state),
        "parameters": (moved, found.parameters),
    }
    made = {what: compare(what, *pair, *promised[what], tolerance) for what, pair in pairs.items()}
    claim, why = promised["random stream"]
    same = expected.streams == found.streams
    level = Level.EQUAL if same else Level.LOSSY
    made["random stream"] = Comparison(
        "random stream", claim, level, None, None, "" if same else why
    )
    rows = (made[what] for what in WHAT)
    return tuple(row if row.ok else suspicion(row, planned.step.plan) for row in rows)


def _beside(
    technique: Technique, without: _Trained, found: _Trained, planned: _Planned
) -> Comparison:
    """All that training leaves behind, with and without one technique of the plan."""
    claim = Level.EQUAL if next(iter(planned.named.values())).is_cpu else Level.ROUNDING
    tolerance = TOLERANCES[torch.float32]
    made = compare(technique.name, without.all(), found.all(), claim, "", tolerance)
    if without.streams != found.streams:
        made = replace(made, found=Level.LOSSY)
    return made if made.ok else suspicion(made, planned.step.plan)


def _alone(
    technique: Technique,
    batch: Any,
    rewind: Callable[[], None],
    tolerance: float,
    *trained: Any,
) -> Comparison:
    """Loss and gradients of one step without dropout, plainly and by one technique alone."""

    def quiet(side: _Copy) -> _Trained:
        turn_off_dropout(side.model)
        return side.train([batch])

    name = technique.name
    rewind()
    whole = quiet(_Plain(*trained))
    drawn = whole.streams[0] != whole.streams[1]
    again = quiet(_Plain(*trained)) if drawn else whole  # from the stream's now
    if drawn and not _worse(name, whole, again, tolerance).ok:
        why = "not compared: without dropout, too, the step is random"
        return Comparison(name, Level.ROUNDING, Level.NONE, None, None, why)
    rewind()
    parts = quiet(_Planned(Plan([technique]), *trained))
    made = _worse(name, whole, parts, tolerance)
    return made if made.ok else suspicion(made, Plan([technique]))


def _worse(name: str, whole: _Trained, parts: _Trained, tolerance: float) -> Comparison:
    """The worse of loss and gradients, each on its own scale."""
    losses = dict(enumerate(whole.losses)), dict(enumerate(parts.losses))
    pairs: list[tuple[Any, Any]] = [losses, (whole.gradients, parts.gradients)]
    why = "gradients are added part by part"
    made = [compare(name, *pair, Level.ROUNDING, why, tolerance) for pair in pairs]
    return max(made, key=lambda comparison: comparison.error or 0)
