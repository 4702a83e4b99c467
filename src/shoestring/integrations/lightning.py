"""Lightning's Trainer under a budget or a plan.

from shoestring.integrations.lightning import BudgetCallback

trainer = Trainer(…, callbacks=[BudgetCallback("24 GB")])
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import InputError, first_line
from ..planning.batches import largest
from ..planning.fit import gradient_bytes
from ..step.clipping import Clip, clip_gradients
from ..step.step import Step
from ..techniques.base import Technique
from ..techniques.plan import Plan
from ..trace.fakes import unwrapped
from ..trace.split import examples_of
from .hosted import (
    BatchCount,
    Part,
    Undo,
    Wanted,
    as_given,
    changes_state,
    hosted_step,
    library,
    of_whole,
    release,
    route_updates,
    synchronized,
)
from .worst_batch import worst_batch

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    Callback = object
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    with library("pytorch-lightning", "2.0", "lightning"):
        from pytorch_lightning import Callback
else:
    try:
        with library("lightning", "2.0", "lightning"):
            from lightning.pytorch import Callback
    except InputError:
        with library("pytorch-lightning", "2.0", "lightning"):
            from pytorch_lightning import Callback


class BudgetCallback(Callback):
    """Runs the forward and backward passes of `fit` by a plan; the rest is Lightning's.

    The plan is made before the first step, for the largest examples of the loader together where
    its data have a length, else for the first batch. Values that `training_step` logs are those of
    the whole batch: where it runs in microbatches, their means weighed as the loss is.

    Args:
        budget: What the GPU may take, such as "24 GB".
        plan: In place of a budget: what `ss.plan` found, techniques, or the file of a plan.
        allow: As for `ss.plan`; "lossless" unless said otherwise.
    """

    def __init__(
        self,
        budget: str | int | None = None,
        *,
        plan: Plan | Iterable[Technique] | str | None = None,
        allow: str | Iterable[str] | None = "lossless",
    ) -> None:
        self._wanted = Wanted.of(budget, plan, allow)
        self.step: Step | None = None
        """Runs the passes, from the first batch on."""
        self._saved: dict[str, Any] = {}
        self._running = self._live = False
        self._outputs: list[Any] = []
        self._put_back: list[tuple[Any, str]] = []
        self._logs: _MeanLogs | None = None
        self._unroute: Undo = lambda: None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Evaluation gets its batches in the type that the plan gives the model."""
        precision = trainer.precision_plugin
        plain = precision.convert_input

        def converted(batch: Any) -> Any:
            made = plain(batch)
            return made if trainer.training or self.step is None else as_given(self.step, made)

        self._patch(precision, "convert_input", converted)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Take over the passes."""
        _check(trainer, pl_module)
        strategy = trainer.strategy
        self._plain = strategy.training_step
        self._backward = strategy.precision_plugin.backward
        self._patch(strategy, "training_step", lambda *args: self._train(trainer, *args))
        # Between `training_step` and the update Lightning zeroes gradients, and goes back.
        self._patch(strategy.precision_plugin, "backward", lambda *args, **others: None)
        self._zero_grad = pl_module.optimizer_zero_grad
        self._patch(pl_module, "optimizer_zero_grad", lambda *args: None)
        self._unroute = route_updates(unwrapped(trainer.optimizers[0]), self._step_of)
        if "plan" in self._saved and changes_state(plan := Plan.from_dict(self._saved["plan"])):
            self._start(trainer, None, (), Wanted(plan=plan))
            assert self.step is not None
            for name, held in self.step._setup.state.items():
                held.load_state_dict(self._saved["techniques"][name])

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leave trainer and model as they were, but for weights a plan stores otherwise."""
        while self._put_back:
            where, name = self._put_back.pop()
            delattr(where, name)
        self._unroute()
        if self._running and self.step is not None:
            release(self.step)
        self._running = False

    def state_dict(self) -> dict[str, Any]:
        """The plan, and what its techniques keep."""
        if self.step is None:
            return {}
        own = {name: held.state_dict() for name, held in self.step._setup.state.items()}
        return {"plan": Plan.of(self.step.plan).to_dict(), "techniques": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Of the run that goes on."""
        self._saved = state_dict

    def _step_of(self) -> Step | None:
        return self.step if self._running else None

    def _patch(self, where: Any, name: str, function: Any) -> None:
        setattr(where, name, function)
        self._put_back.append((where, name))

    def _train(self, trainer: Any, batch: Any, *others: Any) -> Any:
        """In place of the strategy's `training_step`: forward and backward passes of a batch."""
        number = others[0] if others and isinstance(others[0], int) else 0
        if number % trainer.accumulate_grad_batches == 0:
            self._zero_grad(trainer.current_epoch, number, trainer.optimizers[0])
        if not self._running:
            self._start(trainer, batch, others)
        assert self.step is not None and self._logs is not None
        self._others, self._outputs, self._live = others, [], True
        try:
            with self._logs:
                value = self._logs.total = self.step(batch, update=False)
        finally:
            self._live = False
        output = self._outputs[-1]
        if len(self._outputs) > 1:
            total = value * trainer.accumulate_grad_batches
        else:
            total = _loss_of(output).detach()
        if not isinstance(output, dict):
            return total
        if len(self._outputs) > 1 and len(output) > 1:
            warnings.warn(
                "training_step returns more than a loss: it is that of the last microbatch",
                UserWarning,
                stacklevel=2,
            )
        return {**output, "loss": total}

    def _start(self, trainer: Any, batch: Any, others: Any, wanted: Wanted | None = None) -> None:
        chosen, strategy = wanted or self._wanted, trainer.strategy
        module, precision = trainer.lightning_module, trainer.strategy.precision_plugin
        ranked = strategy.model if isinstance(strategy.model, DistributedDataParallel) else None
        self._others, self._outputs, self._running = others, [], True

        def loss(given: nn.Module, part: Any) -> torch.Tensor:
            if self._live and given is module:
                output = self._plain(part, *self._others)
                self._outputs.append(output)
            else:  # to predict or to test: it must leave no trace in the trainer
                with precision.train_step_context():
                    output = _untold(given, trainer, part, *self._others)
            value = _loss_of(output) / trainer.accumulate_grad_batches  # a callback may change it
            if self._live and self._logs is not None and self._logs.part is not None:
                self._logs.part.loss = value.detach()
            return value

        def backward(value: torch.Tensor) -> None:
            if trainer.fit_loop._skip_backward:  # an epoch for BatchNorm's statistics alone
                return
            scaler = getattr(precision, "scaler", None)
            scaled = value if scaler is None else scaler.scale(value)
            self._backward(scaled, module, trainer.optimizers[0])

        if chosen.budget_bytes is not None and batch is not None:
            batch = _largest(trainer, batch)
        self.step = hosted_step(
            chosen, module, batch, loss=loss, optimizer=trainer.optimizers[0], backward=backward,
            held_bytes=0 if ranked is None else gradient_bytes(module), waiting=_waits(trainer),
            same_state=ranked is not None or getattr(precision, "scaler", None) is not None,
        )  # fmt: skip
        setup = self.step._setup
        if ranked is not None:
            setup.split = synchronized(ranked, setup.split)
        self._logs = _MeanLogs(module, setup)
        if self.step.loss_scale is not None:
            self._patch(precision, "clip_gradients", self._clip_scaled)

    def _clip_scaled(self, optimizer: Any, clip_val: Any = 0.0, algorithm: Any = "norm") -> None:
        if clip_val is None or clip_val <= 0:
            return
        assert self.step is not None
        kind = {str(getattr(algorithm, "value", algorithm)): float(clip_val)}
        clip_gradients(Clip(**kind), self.step.model.parameters(), self.step.loss_scale)


class _MeanLogs:
    """Within: what a module logs in several microbatches is logged once, for the whole batch."""

    def __init__(self, module: Any, setup: Any) -> None:
        self._module, self._split = module, setup.split
        self.part: Part | None = None
        """That runs now."""
        self.total: torch.Tensor | None = None
        """The loss of the batch, once all have run."""
        self._found: dict[str, list[tuple[Any, Part]]] = {}
        self._how: dict[str, dict[str, Any]] = {}
        setup.split = self._parts

    def _parts(self, batch: Any) -> Iterator[Any]:
        given = iter(self._split(batch))
        part = next(given, None)
        following = next(given, None)
        if following is not None:
            self._module.log = self._note
        count = BatchCount(self._module)
        while part is not None:
            count.part_begins()
            summed = isinstance(part[1], float) and part[1] == 1.0  # as all parts of a sum weigh
            self.part = Part(_examples(part[0]) if summed or part[1] is None else part[1])
            yield part
            part, following = following, next(given, None)

    def _note(self, name: str, value: Any, *args: Any, **how: Any) -> None:
        named = dict(zip(("prog_bar", "logger", "on_step", "on_epoch"), args, strict=False))
        self._how[name] = {**named, **how}
        assert self.part is not None
        self._found.setdefault(name, []).append((value, self.part))

    def __enter__(self) -> None:
        self._found, self._how = {}, {}

    def __exit__(self, *error: Any) -> None:
        if "log" not in self._module.__dict__:
            return
        del self._module.log
        if error[0] is not None:
            return
        assert self.total is not None
        for name, pairs in self._found.items():
            values, parts = zip(*pairs, strict=True)
            self._module.log(name, of_whole([*values], [*parts], self.total), **self._how[name])


def _examples(batch: Any) -> int:
    """Of a microbatch, whose loss is a sum."""
    try:
        return examples_of(batch) or 1
    except InputError:  # another kind of batch, which a splitter of its own cuts
        return 1


def _waits(trainer: Any) -> bool:
    """Whether gradients of several batches are added, at the start or in a later epoch."""
    later = (getattr(callback, "scheduling", {}) for callback in trainer.callbacks)
    return (
        max(trainer.accumulate_grad_batches, *(n for held in later for n in held.values()), 1) > 1
    )


def _largest(trainer: Any, batch: Any) -> Any:
    """The batch that is planned for: this one, or the largest examples of its loader together."""
    loader = trainer.train_dataloader
    count = getattr(loader, "batch_size", None)
    if not count:
        return batch
    try:
        worst = worst_batch(loader.dataset, count, loader.collate_fn)
        if worst is None:
            return batch
        return largest([batch, trainer.strategy.batch_to_device(worst.batch)])[0]
    except Exception as error:  # data of the user's own kind: the batches as they come
        _log.info("the training data were not scanned: %s", first_line(error))
        return batch


def _untold(module: Any, trainer: Any, *args: Any) -> Any:
    """A training step that logs nothing; copies of a module have no trainer."""
    before, module._trainer = module._trainer, trainer
    module.log = module.log_dict = lambda *args, **others: None
    try:
        return module.training_step(*args)
    finally:
        del module.log, module.log_dict
        module._trainer = before


def _loss_of(output: Any) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, torch.Tensor):
        raise InputError(
            f"training_step returned {type(output).__name__}, not a loss",
            hint="return a tensor, or a dict with 'loss'; batches cannot be skipped under a plan",
        )
    return loss


def _check(trainer: Any, module: Any) -> None:
    """InputError for what a step by a plan cannot keep, before anything is trained."""
    strategy = type(trainer.strategy).__name__
    for told, why in (
        ("manual optimization" * (not module.automatic_optimization), "use ss.apply there"),
        (f"{len(trainer.optimizers)} optimizers" * (len(trainer.optimizers) != 1), "one trains"),
        (
            f"the strategy {strategy}" * (strategy not in ("SingleDeviceStrategy", "DDPStrategy")),
            "one device, or strategy='ddp'",
        ),
    ):
        if told:
            raise InputError(f"a trainer by a plan cannot keep {told}", hint=why)
