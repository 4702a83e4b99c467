"""`verify`: plain and planned training side by side, on copies, with the same data and seeds."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import InputError, NoEffectWarning
from ..memory.live.measure import measure, training_step
from ..step.apply import Step, apply
from ..step.predict import predict_step
from ..techniques.base import Technique
from ..techniques.checkpointing.caches import caches_off
from ..techniques.microbatching.split import examples_of
from ..techniques.plan import Plan
from ..techniques.precision.blocks import block_elements, cut
from ..techniques.precision.moments import SQUARES, SUFFIX, power_of_two
from ..techniques.sparsity.modules import sparse_tensors
from ..techniques.sparsity.tensor import SparseTensor
from ..trace.batches import map_tensors
from ..trace.blocks import is_normalization
from ..trace.capture import Loss, user_code
from ..trace.fakes import check_optimizer, make_optimizer
from ..trace.streams import rewound_streams, stream_states
from .certificate import TOLERANCES, Certificate, Comparison, Level, compare
from .claims import (
    MICROBATCHES,
    RECOMPUTATION,
    WHAT,
    Circumstances,
    Claims,
    claims,
    hides_microbatches,
    suspicion,
)
from .dropout import turn_off_dropout
from .floats import computed_kinds, whole_fp32

Optimizer = torch.optim.Optimizer
PEAKS_DRAWN = 6
"""Predictions that tell whether a peak is random."""


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
    chosen = Plan.of(plan.techniques if isinstance(plan, Plan) else plan)  # without a budget
    check_optimizer(optimizer)
    data = _batches(batches, steps)
    compared = nullcontext() if chosen.checkpointing is None else caches_off(model)
    with rewound_streams() as rewind, compared, ExitStack() as trained:
        trained.enter_context(whole_fp32())
        plain = _Plain(model, optimizer, loss)
        expected = plain.train(data)
        kinds = plain.kinds(data[0])
        rewind()
        planned = _Planned(chosen, model, optimizer, loss)
        if planned.sparse:
            expected.gradients = _Plain(model, optimizer, loss).masked_gradients(planned, data[0])
            rewind()
        found = planned.train(data)
        at = _circumstances(chosen, model, optimizer, data, expected)
        promised = claims(chosen, at)
        types = kinds | {p.dtype for p in planned.named.values()}
        comparisons = _compare(expected, found, promised, planned, _tolerance(types), at.split)
        if hides_microbatches(chosen, at, promised):
            batch = next(batch for batch in data if _is_cut(chosen, batch))
            given = chosen, batch, rewind, _tolerance(kinds), model, optimizer, loss
            comparisons += (_microbatches(*given),)
        if chosen.checkpointing is not None and len(chosen.techniques) > 1:
            rewind()
            kept = replace(chosen, checkpointing=None)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NoEffectWarning)  # said once
                without = _Planned(kept, model, optimizer, loss).train(data)
            comparisons += (_recomputation(without, found, planned),)
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
        return made if made.peak_ok else replace(made, peak_varies=_varies(predicted_bytes))


def _varies(peak_bytes: Callable[[], int]) -> bool:
    """Whether the peak is another one where random streams stand elsewhere."""
    found = set()
    for _ in range(PEAKS_DRAWN):
        torch.rand(()), random.random(), np.random.rand()
        found.add(peak_bytes())
    return len(found) > 1


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
    micro = plan.microbatching
    return micro is not None and (examples_of(batch) or 0) > micro.examples_at_once(batch)


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
        made.state = {
            (name, key): self._held(p, key).clone()
            for name, p in self.named.items()
            for key, held in self.optimizer.state.get(p, {}).items()
            if isinstance(held, torch.Tensor) and not key.endswith(SUFFIX)
        }
        return made

    def _held(self, parameter: torch.Tensor, key: str) -> torch.Tensor:
        """A state tensor; one that is stored times powers of two, as it is meant."""
        state = self.optimizer.state[parameter]
        held: torch.Tensor = state[key]
        if key + SUFFIX not in state:
            return held
        exponents, meant = state[key + SUFFIX], held.float()
        total = sum(p.numel() for group in self.optimizer.param_groups for p in group["params"])
        rows = [...] if exponents.numel() == 1 else cut(held, block_elements(total))
        for part, scale in zip(rows, power_of_two(-exponents), strict=True):
            meant[part] *= scale
        return meant.square() if key in SQUARES else meant


class _Plain(_Copy):
    """As PyTorch trains."""

    def run(self, batch: Any) -> torch.Tensor:
        return training_step(self.model, batch, self.loss, self.optimizer)

    def kinds(self, batch: Any) -> set[torch.dtype]:
        """In which the loss is computed, and the gradients with it."""
        with user_code():
            return computed_kinds(lambda: self.loss(self.model, map_tensors(torch.clone, batch)))

    def masked_gradients(self, planned: _Planned, batch: Any) -> dict[str, torch.Tensor]:
        """Of the model that is zero where the plan's is, at its nonzeros."""
        with torch.no_grad():
            for name, tensor in planned.sparse.items():
                self.named[name].mul_(tensor.mask().view(tensor.shape))
        gradients = self.train([batch]).gradients
        return {name: planned.at_nonzeros(name, g) for name, g in gradients.items()}


class _Planned(_Copy):
    """As the plan says."""

    def __init__(self, plan: Plan, model: nn.Module, optimizer: Optimizer, loss: Loss) -> None:
        super().__init__(model, optimizer, loss)
        self.step: Step = apply(plan, self.model, self.optimizer, loss=loss)
        self.sparse: dict[str, SparseTensor] = sparse_tensors(self.model)

    def run(self, batch: Any) -> torch.Tensor:
        return self.step(batch)

    def gradient(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Without the loss scale."""
        scale = getattr(self.step._setup.state.get("precision"), "scale", None)
        return super().gradient(name, gradient if scale is None else gradient / scale.scale)

    def at_nonzeros(self, name: str, dense: torch.Tensor) -> torch.Tensor:
        """What a tensor of plain training is to be compared with."""
        tensor = self.sparse.get(name)
        fits = tensor is not None and dense.shape == tensor.shape
        return tensor.gather(dense) if tensor is not None and fits else dense


def _compare(
    expected: _Trained,
    found: _Trained,
    promised: Claims,
    planned: _Planned,
    tolerance: float,
    split: bool,
) -> tuple[Comparison, ...]:
    at = planned.at_nonzeros
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
    return tuple(row if row.ok else suspicion(row, split=split) for row in rows)


def _recomputation(kept: _Trained, again: _Trained, planned: _Planned) -> Comparison:
    """All that training leaves behind, with and without running things again."""
    claim = Level.EQUAL if next(iter(planned.named.values())).is_cpu else Level.ROUNDING
    tolerance = TOLERANCES[torch.float32]
    made = compare(RECOMPUTATION, kept.all(), again.all(), claim, "", tolerance)
    if kept.streams != again.streams:
        made = replace(made, found=Level.LOSSY)
    return made if made.ok else suspicion(made)


def _microbatches(
    plan: Plan,
    batch: Any,
    rewind: Callable[[], None],
    tolerance: float,
    *trained: Any,
) -> Comparison:
    """Loss and gradients of one step without dropout, whole and part by part."""

    def quiet(side: _Copy) -> _Trained:
        turn_off_dropout(side.model)
        return side.train([batch])

    rewind()
    whole = quiet(_Plain(*trained))
    drawn = whole.streams[0] != whole.streams[1]
    if drawn and not _split(whole, quiet(_Plain(*trained)), tolerance).ok:  # from the stream's now
        why = "not compared: without dropout, too, the step is random"
        return Comparison(MICROBATCHES, Level.ROUNDING, Level.NONE, None, None, why)
    rewind()
    parts = quiet(_Planned(Plan(microbatching=plan.microbatching), *trained))
    made = _split(whole, parts, tolerance)
    return made if made.ok else suspicion(made)


def _split(whole: _Trained, parts: _Trained, tolerance: float) -> Comparison:
    """The worse of loss and gradients, each on its own scale."""
    losses = dict(enumerate(whole.losses)), dict(enumerate(parts.losses))
    pairs: list[tuple[Any, Any]] = [losses, (whole.gradients, parts.gradients)]
    why = "gradients are added part by part"
    made = [compare(MICROBATCHES, *pair, Level.ROUNDING, why, tolerance) for pair in pairs]
    return max(made, key=lambda comparison: comparison.error or 0)
