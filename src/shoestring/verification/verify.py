"""`verify`: plain and planned training side by side, on copies, with the same data and draws."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from numbers import Real
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from ..memory.live.measure import measure
from ..planning.by_running import untraced
from ..step.predict import predict_step
from ..techniques.base import Technique
from ..techniques.claims import Level
from ..techniques.plan import Plan
from ..trace.batches import map_tensors, tensors_of
from ..trace.draws import has_random_depth
from ..trace.failures import check_trainable, check_values
from ..trace.fakes import check_optimizer, late_in_training, unwrapped
from ..trace.settling import makes_state
from ..trace.streams import rewound
from ..trace.tracing import Loss
from ..trace.untouched import hooks_of
from .certificate import Certificate, Comparison
from .floats import whole_fp32
from .other import Against
from .pair import Pair
from .proof import prove
from .sides import Optimizer, Plain


def verify(
    plan: Plan | Iterable[Technique],
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Loss,
    optimizer: Optimizer,
    steps: int = 3,
    against: Against | None = None,
    near: float | None = None,
    lossy: float | None = None,
    accept: str | Sequence[str] = (),
) -> Certificate:
    """Train two copies for a few steps, one plainly and one by the plan, and compare them.

    It compares the gradients of the first step before the update, and all else after the last step.
    Plain training in FP64 measures the rounding of this step; a multiple of it is allowed. The plan
    runs in FP64 as well, so that rounding hides no error. Microbatches draw the random numbers of
    the whole batch. FP32 is computed without TF32.

    Args:
        plan: A plan or a list of techniques.
        model: Not changed, like the optimizer and the random streams.
        batches: A list of batches; with fewer batches than steps they repeat.
        loss: `(model, batch) -> scalar`.
        optimizer: Over the model's parameters.
        steps: How many steps to train.
        against: Another model, or (model, optimizer) or (model, optimizer, loss), to compare with
            in place of plain training: one that is checkpointed, compiled or fused. It starts from
            the same weights, by name.
        near: Relative bound for a claim of "near". By default a multiple of the noise that
            16 bits make in this step.
        lossy: The same for a lossy claim; unbounded by default.
        accept: Rows to accept although they could not be compared (UNPROVEN).

    Returns:
        A `Certificate`. Its `ok` says whether every claim holds; `check()` raises if not.

    Examples:
        >>> ss.verify(plan, model, [batch], loss=loss, optimizer=optimizer).ok
        True
    """
    chosen = Plan.of(plan)
    for name, bound in (("near", near), ("lossy", lossy)):
        if bound is not None and not (isinstance(bound, Real) and bound >= 0):
            raise InputError(f"{name}={bound!r} is not a bound", hint="such as 0.05, which is 5%")
    check_trainable(model)
    check_values(model)
    check_optimizer(optimizer)
    optimizer = unwrapped(optimizer)
    data = _batches(batches, steps)
    if not isinstance(accept, Iterable):
        raise InputError(f"cannot accept {accept!r}", hint="names of rows, such as 'gradients'")
    accepted = {accept} if isinstance(accept, str) else set(accept)
    trial = Plain(model, optimizer, loss)
    functions = [loss, *hooks_of(model)]
    if isinstance(against, tuple):
        functions += [function for function in against[2:] if callable(function)]
    touched = rewound(functions, trial.model, lambda: trial.train(data[:1]))
    with touched as rewind, ExitStack() as compared:
        for technique in chosen.techniques:
            compared.enter_context(technique.comparable(model))
        with whole_fp32():
            given = chosen, model, optimizer, loss, data, rewind, against
            made, rows = prove(*given, near=near, lossy=lossy)
        rows = [
            replace(row, accepted=row.found is Level.UNPROVEN and row.what in accepted)
            for row in rows
        ]
        rewind()  # another network may be in FP64 by now
        return _with_peak(made, tuple(rows), model, optimizer, loss, steps)


def _with_peak(
    made: Pair,
    rows: tuple[Comparison, ...],
    model: nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    steps: int,
) -> Certificate:
    batch = made.data[0]
    there = next(model.parameters()).device.type

    def predicted_bytes() -> int | None:
        if made.against is not None:
            return None
        try:
            return predict_step(
                made.plan, model, batch, loss=loss, optimizer=optimizer, device=there
            ).peak_bytes
        except Exception as error:  # what it computes was compared all the same
            if untraced(error) is None:
                raise
            return None

    predicted = predicted_bytes()
    late_in_training(made.planned.step.optimizer)
    with _put_back(batch):
        measured = made.planned.step.measure(batch)
    plain = made.plain
    before = measure(plain.model, batch, loss=plain.loss, optimizer=plain.optimizer, warmup_steps=1)
    found = Certificate(
        made.plan,
        measured.device,
        steps,
        rows,
        predicted,
        measured.peak_bytes,
        before.peak_bytes,
        reference=made.reference,
        beside="plain training" if made.against is None else "the model given",
    )
    # Of a random depth the prediction is the worst draw's; of state that grows, a later step's.
    varies = has_random_depth(model) or makes_state(model)
    drawn = varies and measured.peak_bytes <= (predicted or 0)
    return found if found.peak_ok or not drawn else replace(found, peak_varies=True)


@contextmanager
def _put_back(batch: Any) -> Iterator[None]:
    """Values that a loss writes into its batch are as before on leaving."""
    held = [(t, t._version, t.detach().to("cpu", copy=True)) for t in tensors_of(batch)]
    try:
        yield
    finally:
        for tensor, version, values in held:
            if tensor._version != version:
                tensor.detach().copy_(values)


def _without_graph(batch: Any) -> Any:
    """A batch that is itself a result: the graph behind it, and its gradients, stay the user's."""
    if not any(t.requires_grad for t in tensors_of(batch)):
        return batch
    return map_tensors(lambda t: t.detach().requires_grad_() if t.requires_grad else t, batch)


def _batches(batches: Iterable[Any], steps: int) -> list[Any]:
    if not isinstance(steps, int) or steps < 1:
        raise InputError(f"verify cannot run {steps} steps", hint="a whole number from 1")
    one = not isinstance(batches, Iterable) or isinstance(batches, (str, torch.Tensor, Mapping))
    if one or isinstance(batches, tuple):
        raise InputError("batches is one batch, not several", hint="give a list, [batch]")
    given = [_without_graph(batch) for batch in islice(batches, steps)]
    if not given:
        raise InputError("there is no batch to verify with", hint="give a list, [batch]")
    return [given[number % len(given)] for number in range(steps)]
