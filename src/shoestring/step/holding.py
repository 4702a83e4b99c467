"""A step that watches its budget: says when its peak passes it, and takes back what failed."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch

from ..errors import BudgetError, BudgetWarning
from ..techniques.plan import Plan
from ..torch_private.cuda_memory import at_most, expand_segments
from ..trace.batches import tensors_of
from ..trace.streams import kept_streams
from ..units import format_size

if TYPE_CHECKING:
    from .step import Step

RETRIES = 8
"""Tighter plans tried for one minibatch."""

Tighten = Callable[["Step", Any, int | None], None]
"""Go on by a plan for less; given the batch and its peak, or None when the device ran out."""


class Hold:
    """Runs the steps of a plan for a budget and compares what they need with it.

    On CUDA the allocator is held to the budget while a step runs: it gives idle memory back rather
    than take more from the card. On the CPU storages are followed in the second step of every kind
    (shapes, with an update or without) once there is optimizer state; the others run as they are.
    """

    def __init__(self, step: Step, plan: Plan, tighten: Tighten | None = None) -> None:
        self._step, self._plan, self._tighten = step, plan, tighten
        self._seen: dict[Any, int] = {}
        self._followed: set[Any] = set()
        """Kinds of steps whose storages were followed, on the CPU."""
        assert plan.budget_bytes is not None
        self._budget_bytes: int = plan.budget_bytes
        self._moving: set[str] | None = None
        """Buffers that a step writes to, known after the first."""
        self._first: dict[str, torch.Tensor] = {}
        self._device = next(step.model.parameters()).device
        self._of_card = plan.budget_of == "reserved"
        self._limited = self._device.type == "cuda" and self._of_card
        self.running = False
        self._others_bytes = 0
        """On CUDA: of tensors that are there already and are not the step's."""
        if self._limited:
            expand_segments()
            torch.cuda.empty_cache()
            self._others_bytes = _others(step, self._device)
            step.model.register_forward_pre_hook(_GivesWay(self))

    def __call__(self, batch: Any, update: bool = True) -> torch.Tensor:
        """One step; where the device runs out of memory, as if it had not begun.

        Gradients of batches before it cannot be told from its own, and are lost with it.
        """
        for number in range(RETRIES):
            undo = self._undo()
            waiting = self._step._waiting
            try:
                loss, peak_bytes = self._run(batch, update)
            except Exception as error:
                if not out_of_memory(error):
                    raise
            else:
                self._succeeded(batch, peak_bytes)
                return loss
            # Only now: the error's traceback held the tensors of the step.
            message = self._failed(undo)
            if waiting:
                message += f"; accumulated {waiting} before it are lost"
                raise BudgetError(message, hint=f"{_HINT}; then run those batches again")
            if self._limited and number == 0:
                continue  # with an empty cache less lies between blocks that are used
            if self._tighten is None and self._limited:
                self._limited = False
                warnings.warn(f"{message}; it goes on with more", BudgetWarning, stacklevel=3)
                continue
            if self._tighten is None:
                raise BudgetError(message, hint=_HINT)
            warnings.warn(message, BudgetWarning, stacklevel=3)
            self._go_on(batch, None)
        raise BudgetError(f"{message}, {RETRIES} times in a row", hint=_HINT)

    def _succeeded(self, batch: Any, peak_bytes: int | None) -> None:
        if self._moving is None:
            # By value: BatchNorm's kernels do not count as writing.
            buffers = dict(self._step.model.named_buffers())
            first = self._first
            self._moving = {n for n, b in buffers.items() if not _same(first.get(n), b)}
            self._first = {}
        if peak_bytes is not None and peak_bytes > self._budget_bytes:
            self._passed(batch, peak_bytes)

    def _go_on(self, batch: Any, peak_bytes: int | None) -> None:
        assert self._tighten is not None
        self._tighten(self._step, batch, peak_bytes)
        self._plan, self._seen, self._followed = self._step.plan, {}, set()

    def _run(self, batch: Any, update: bool) -> tuple[torch.Tensor, int | None]:
        step = self._step
        if self._device.type == "cuda":
            most = (
                torch.cuda.max_memory_reserved if self._of_card else torch.cuda.max_memory_allocated
            )
            before = most() - self._others_bytes
            if before > self._budget_bytes:  # of something else, and it would hide this step
                torch.cuda.reset_peak_memory_stats()
                before = 0
            limit = self._budget_bytes + self._others_bytes
            held = at_most(limit, self._device) if self._limited else nullcontext()
            self.running = True
            try:
                with held:
                    loss = step._run(batch, update)
            finally:
                self.running = False
            if (
                step.captured
                and not self._limited
                and step.captured_peak_bytes > self._budget_bytes
            ):
                self._run_eagerly()
                return loss, None
            reached = most() - self._others_bytes
            return loss, reached if reached > before else None
        kind = shapes_of(batch), update, bool(step._waiting)
        self._seen[kind] = self._seen.get(kind, 0) + 1
        if kind in self._followed or self._seen[kind] < 2 or not step.steady:
            return step._run(batch, update), None
        self._followed.add(kind)
        peak_bytes = step.measure(batch, update=update).peak_bytes
        assert step.loss is not None
        return step.loss, peak_bytes

    def _run_eagerly(self) -> None:
        """A captured step holds its batch and library workspaces a second time."""
        needed, budget = self._step.captured_peak_bytes, self._budget_bytes
        warnings.warn(
            f"captured as a CUDA graph the step needs {_size(needed)} of {_size(budget)}; "
            "it goes on eagerly",
            BudgetWarning,
            stacklevel=5,
        )
        self._step.use_graph(False, "captured, the step needs more than its budget")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def give_way(self) -> None:
        """Drop the captured step; it is captured again when the next one comes."""
        if self._step.captured:
            assert self._step._graph is not None
            self._step._graph.drop()
            torch.cuda.empty_cache()

    def _undo(self) -> Callable[[], bool]:
        """Undoes the step: random streams and buffers; False if the update has begun."""
        step = self._step
        step._setup.updating = False
        rewind = kept_streams()
        buffers = dict(step.model.named_buffers())
        moving = buffers if self._moving is None else self._moving & buffers.keys()
        held = {name: buffers[name].detach().clone() for name in moving}
        if self._moving is None:
            self._first = held
        weights = [(p, p._version) for p in step.model.parameters()]

        def undo() -> bool:
            step.optimizer.zero_grad(set_to_none=True)
            for parameter in step.model.parameters():
                parameter.grad = None
            if step._setup.updating or any(p._version != version for p, version in weights):
                return False
            with torch.no_grad():
                for name, value in held.items():
                    buffers[name].copy_(value)
            rewind()
            return True

        return undo

    def _failed(self, undo: Callable[[], bool]) -> str:
        """Free what the step left; say what it was planned to need."""
        intact = undo()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        plan = self._plan
        planned, budget = _size(plan.predicted.peak_bytes), _size(self._budget_bytes)
        told = f"predicted {planned} for a budget of {budget}"
        message = f"out of memory by the plan {plan.short()}: {told}"
        if not intact:
            raise BudgetError(
                message + "; it happened within the update, so weights have partly moved",
                hint="go on from a snapshot, with a smaller budget",
            )
        return message + "; the step did not happen"

    def _passed(self, batch: Any, peak_bytes: int) -> None:
        plan = self._plan
        over = _size(peak_bytes - self._budget_bytes)
        message = (
            f"the step needed {_size(peak_bytes)}, {over} more than its budget of "
            f"{_size(self._budget_bytes)}; predicted were {_size(plan.predicted.peak_bytes)}"
        )
        if self._tighten is not None:
            try:
                self._go_on(batch, peak_bytes)
            except BudgetError as error:  # the step is done, and others may need less
                message += f"; {error.message}"
        warnings.warn(message, BudgetWarning, stacklevel=5)


class _GivesWay:
    """Called when the model runs: an evaluation between two steps gets the memory of the graph.

    The pool of a captured step is its own, so what runs beside it would come on top.
    """

    def __init__(self, hold: Hold) -> None:
        self._hold = weakref.ref(hold)

    def __call__(self, *_: Any) -> None:
        hold = self._hold()
        if hold is not None and not hold.running:
            hold.give_way()

    def __deepcopy__(self, memo: Any) -> _GivesWay:
        return self

    def __reduce__(self) -> Any:
        return _nobody_made, ()


def _nobody(*_: Any) -> None:
    """Its state in a saved model."""


def _nobody_made() -> Callable[..., None]:
    return _nobody


def _others(step: Step, device: torch.device) -> int:
    """Bytes of tensors on the GPU that belong neither to the model nor to its optimizer."""
    state = [v for held in step.optimizer.state.values() for v in held.values()]
    own: dict[int, int] = {}
    for tensor in (*step.model.parameters(), *step.model.buffers(), *state):
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            with suppress(RuntimeError, NotImplementedError):  # wrappers have no storage
                own[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return max(torch.cuda.memory_allocated(device) - sum(own.values()), 0)


def shapes_of(batch: Any) -> tuple[torch.Size, ...]:
    """Of all its tensors."""
    return tuple(tensor.shape for tensor in tensors_of(batch))


_HINT = "plan for a smaller budget, or use fit, which does"
_SIGNS = ("can't allocate memory", "not enough memory", "bad_alloc", "out of memory")


def out_of_memory(error: BaseException) -> bool:
    """Whether it says that a device or the machine has no more memory; its cause counts."""
    while error.__cause__ is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def _same(before: torch.Tensor | None, now: torch.Tensor) -> bool:
    return before is not None and before.shape == now.shape and torch.equal(before, now)


def _size(nbytes: int) -> str:
    return format_size(nbytes, digits=2)
