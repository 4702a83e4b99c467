"""Hugging Face's Trainer, and TRL's, under a budget or a plan.

    from shoestring.integrations.transformers import BudgetTrainer

    trainer = BudgetTrainer(model=model, args=args, train_dataset=data, budget="24 GB")

For another trainer, such as TRL's: `class BudgetSFT(Budgeted, SFTTrainer): pass`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import BudgetError, InputError, TraceError, first_line
from ..planning.batches import largest
from ..planning.fit import gradient_bytes
from ..step.predict import evaluation_bytes
from ..step.step import Step
from ..techniques.base import Technique
from ..techniques.plan import Plan
from ..trace.fakes import unwrapped
from ..units import format_size
from .hosted import (
    BatchCount,
    Part,
    Wanted,
    as_given,
    changes_state,
    clip_scaled,
    hosted_step,
    library,
    of_whole,
    release,
    route_updates,
    synchronized,
)
from .worst_batch import Worst, worst_batch

with library("transformers", "5.0", "hf"):
    import transformers

PLAN_FILE, STATE_FILE = "shoestring_plan.toml", "shoestring_state.pt"
"""In a checkpoint's folder, beside Hugging Face's own."""

_log = logging.getLogger(__name__)


@dataclass
class _Part(Part):
    """And the calls of `log` it made, and what `training_step` returned."""

    logged: list[tuple[dict[str, Any], Any, Any]] = field(default_factory=list)
    returned: Any = None


class Budgeted:
    """For a class beside a Trainer: its forward and backward passes run by a plan.

    Everything else is the Trainer's: clipping, accumulation, schedulers, logs, evaluation, saving.
    The plan is made before the first step, for the largest examples of the training data together
    (or for the first batch, where data have no length or a plan is given), and evaluation batches
    are checked. Where a later batch does not fit, the step is taken back and planned again.

    Args:
        budget: What the GPU may take, such as "24 GB".
        plan: In place of a budget: what `ss.plan` found, techniques, or the file of a plan.
        allow: As for `ss.plan`; "lossless" unless said otherwise.
    """

    step: Step | None = None
    """Runs the passes, from the first batch on."""

    def __init__(
        self,
        *args: Any,
        budget: str | int | None = None,
        plan: Plan | Iterable[Technique] | str | None = None,
        allow: str | Iterable[str] | None = "lossless",
        **kwargs: Any,
    ) -> None:
        self._wanted = Wanted.of(budget, plan, allow)
        self._in_step = False
        self._parts: list[_Part] = []
        super().__init__(*args, **kwargs)
        check_options(self)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's."""
        check_options(self)
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Forward and backward passes of one batch; gradients are left to the Trainer."""
        batch = self._prepare_inputs(inputs), num_items_in_batch
        self._count = BatchCount(self)
        if not self._goes_on(self._bare(model)):
            self._start(model, batch)
        assert self.step is not None
        model.train()
        self._parts = []
        before = {name: len(values) for name, values in self._noted().items()}
        loss = self.step(batch, update=False)
        parts = self._merge(before, loss)
        told = parts[0].returned
        if len(parts) > 1:
            told = of_whole([part.returned for part in parts], [*parts], loss)
        return torch.as_tensor(told, device=self.args.device)  # type: ignore[attr-defined]

    def _goes_on(self, model: nn.Module) -> bool:
        """Whether the step is for this model and optimizer; a second `train()` may have others."""
        step = self.step
        if step is None or step.model is not model:
            return False
        if step.optimizer is unwrapped(self.optimizer):  # type: ignore[attr-defined]
            return True
        self._unroute()
        if changes_state(step.plan):
            raise InputError(
                f"the model was changed by {step.plan.short()} for another optimizer",
                hint="train on with the same optimizer, or load the weights into a new model",
            )
        release(step)
        return False

    def _bare(self, model: nn.Module) -> nn.Module:
        return self.accelerator.unwrap_model(model)  # type: ignore[attr-defined]

    def _start(self, model: nn.Module, batch: Any, wanted: Wanted | None = None) -> None:
        trainer: Any = self
        chosen = wanted or self._wanted
        bare = self._bare(model)
        ranked = model if isinstance(model, DistributedDataParallel) else None
        backward = trainer.accelerator.backward
        passes = super().training_step  # type: ignore[misc]

        def loss(given: nn.Module, batch: Any) -> torch.Tensor:
            inputs, items = batch
            found: list[torch.Tensor] = []
            trainer.accelerator.backward = lambda value, **others: found.append(value)
            self._parts.append(_Part(self._units(inputs)))
            self._count.part_begins()
            self._in_step = True
            try:
                with _in_place(trainer, bare, given):
                    returned = passes(model if given is bare else given, dict(inputs), items)
            finally:
                self._in_step = False
                del trainer.accelerator.backward
            if len(found) != 1:
                raise InputError(
                    f"{type(self).__name__}.training_step made {len(found)} backward passes of "
                    "accelerator.backward, not one",
                    hint="use ss.apply in a loop of your own",
                )
            self._parts[-1].loss, self._parts[-1].returned = found[0].detach(), returned
            return found[0]

        bare.train()
        if chosen.budget_bytes is not None and batch is not None:
            batch = self._largest(batch)
            self._check_evaluation(bare, chosen.budget_bytes)
        self.step = hosted_step(
            chosen, bare, batch, loss=loss, optimizer=trainer.optimizer, backward=backward,
            held_bytes=0 if ranked is None else gradient_bytes(bare),  # DDP's buckets
            waiting=trainer.args.gradient_accumulation_steps > 1,
            same_state=ranked is not None or trainer.accelerator.scaler is not None,
        )  # fmt: skip
        self._unroute = route_updates(self.step.optimizer, lambda: self.step)
        if ranked is not None:
            self.step._setup.split = synchronized(ranked, self.step._setup.split)
        plan = self.step.plan
        predicted = getattr(plan, "predicted", None)
        told = "" if predicted is None else f", predicted {format_size(predicted.peak_bytes)}"
        _log.info("training by the plan %s%s", plan.short(), told)

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """As the Trainer's; of what microbatches of one batch log, their weighed mean, once."""
        if self._in_step:
            self._parts[-1].logged.append((logs, args, kwargs))
        else:
            super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _noted(self) -> dict[str, list[Any]]:
        """Lists of TRL's that a batch appends to, by the names its logs will have."""
        held = getattr(self, "_metrics", None)
        held = held.get("train") if isinstance(held, dict) else None
        return held if isinstance(held, dict) else {}

    def _units(self, inputs: Any) -> Any:
        """How much a microbatch counts in means: labels that are not ignored, or examples."""
        labels = inputs.get("shift_labels", inputs.get("labels"))
        if isinstance(labels, torch.Tensor):
            if "shift_labels" not in inputs and getattr(self, "_loss_shifts_labels", False):
                labels = labels[..., 1:]
            return labels.ne(-100).sum()
        tensors = (v for v in inputs.values() if isinstance(v, torch.Tensor) and v.ndim)
        return next((len(tensor) for tensor in tensors), 1)

    def _merge(self, before: dict[str, int], total: torch.Tensor) -> list[_Part]:
        """One batch, one value, of all that its microbatches logged and noted; the microbatches."""
        parts, self._parts = self._parts, []
        for name, values in self._noted().items():
            new = values[(start := before.get(name, 0)) :]
            if len(new) == len(parts) > 1:
                values[start:] = [of_whole(new, [*parts], total)]
        for calls in zip(*(part.logged for part in parts), strict=False):
            told, args, kwargs = calls[-1]
            if len(calls) > 1:
                told = {
                    n: of_whole([call[0].get(n) for call in calls], [*parts], total) for n in told
                }
            self.log(told, *args, **kwargs)
        return parts

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kw: Any
    ) -> Any:
        """As the Trainer's; inputs have the type that the plan gives the model."""
        if self.step is not None:
            kept = {name: inputs[name] for name in self.label_names if name in inputs}  # type: ignore[attr-defined]
            inputs = {**as_given(self.step, inputs), **kept}
        return super().prediction_step(model, inputs, *args, **kw)  # type: ignore[misc]

    def _largest(self, batch: Any) -> Any:
        """The batch that is planned for: this one, or the largest examples together."""
        args: Any = self.args  # type: ignore[attr-defined]
        worst = self._worst(self.train_dataset, args.train_batch_size, "training")  # type: ignore[attr-defined]
        if worst is None:
            return batch
        found = self._prepare_inputs(worst.batch), batch[1]
        chosen = largest([batch, found])[0]
        if chosen is found:
            seen = "" if worst.whole else f" of {worst.seen:,} that were seen"
            _log.info("planning for the largest examples%s, number %d first", seen, worst.at)
        return chosen

    def _worst(self, dataset: Any, count: int, what: str) -> Worst | None:
        trainer: Any = self
        try:
            if hasattr(dataset, "column_names"):
                dataset, collate = (
                    trainer._remove_unused_columns(dataset, what),
                    trainer.data_collator,
                )
            else:
                collate = trainer._get_collator_with_removed_columns(trainer.data_collator, what)
            return worst_batch(dataset, count, collate)
        except Exception as error:  # data of the user's own kind: the batches as they come
            _log.info("the %s data were not scanned: %s", what, first_line(error))
            return None

    def _check_evaluation(self, model: nn.Module, budget_bytes: int) -> None:
        """BudgetError, before training, for evaluation batches that do not fit."""
        trainer: Any = self
        given, args = trainer.eval_dataset, trainer.args
        if given is None or str(getattr(args.eval_strategy, "value", args.eval_strategy)) == "no":
            return
        for name, dataset in (given if isinstance(given, dict) else {"": given}).items():
            worst = self._worst(dataset, args.eval_batch_size, "evaluation")
            if worst is None:
                continue
            try:
                needed = evaluation_bytes(
                    model, self._prepare_inputs(worst.batch), optimizer=trainer.optimizer,
                    loss=lambda m, inputs: trainer.compute_loss(m, dict(inputs)),
                    device=next(model.parameters()).device.type,
                )  # fmt: skip
            except (InputError, TraceError) as error:
                _log.info("evaluation was not predicted: %s", first_line(error))
                continue
            if needed > budget_bytes:
                raise BudgetError(
                    f"evaluation{f' of {name}' * bool(name)} takes {format_size(needed)} of "
                    f"{format_size(budget_bytes)}, with example {worst.at:,} in a batch of "
                    f"{args.eval_batch_size}",
                    hint="a smaller per_device_eval_batch_size, or cut long examples",
                )

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Once a batch: within the step it lies where it should."""
        return inputs if self._in_step else super()._prepare_inputs(inputs)  # type: ignore[misc]

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        norm = self.args.max_grad_norm  # type: ignore[attr-defined]
        found = None if self.step is None else clip_scaled(self.step, norm)
        return super()._clip_grad_norm(model) if found is None else found  # type: ignore[misc]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None and self.step is not None:
            grad_norm = clip_scaled(self.step, float("inf"))
        return super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        if self.step is not None and self.args.should_save:  # type: ignore[attr-defined]
            Plan.of(self.step.plan).save(Path(output_dir) / PLAN_FILE)
            own = {name: held.state_dict() for name, held in self.step._setup.state.items()}
            torch.save(own, Path(output_dir) / STATE_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """State that a plan stores otherwise is loaded by the same plan."""
        plan = None if checkpoint is None else Path(checkpoint) / PLAN_FILE
        if plan is not None and plan.exists() and changes_state(saved := Plan.load(plan)):
            self._start(self.model_wrapped, None, Wanted(plan=saved))  # type: ignore[attr-defined]
            own = torch.load(plan.parent / STATE_FILE, weights_only=True)
            assert self.step is not None
            for name, held in self.step._setup.state.items():
                held.load_state_dict(own[name])
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]


class BudgetTrainer(Budgeted, transformers.Trainer):
    """`transformers.Trainer` within a budget: `BudgetTrainer(…, budget="24 GB")`."""


@contextmanager
def _in_place(trainer: Any, model: nn.Module, copied: nn.Module) -> Iterator[None]:
    """Wherever a trainer has the model, it has the copy: TRL asks `trainer.model` for the
    reference, and a loss of sentence-transformers is a module that holds the model."""
    if copied is model:
        yield
        return
    own = [value for value in vars(trainer).values() if value is not model]
    own += [value for held in own if isinstance(held, dict) for value in held.values()]
    holding = [
        (module._modules, name)
        for value in own
        if isinstance(value, nn.Module)
        for module in value.modules()
        for name, child in module._modules.items()
        if child is model and module is not trainer.model_wrapped
    ]
    trainer.model = copied
    for modules, name in holding:
        modules[name] = copied
    try:
        yield
    finally:
        trainer.model = model
        for modules, name in holding:
            modules[name] = model


def check_options(trainer: Any) -> None:
    """InputError for what a step by a plan cannot keep, before anything is trained."""
    args = trainer.args
    optimizer = str(getattr(args.optim, "value", args.optim))
    for told, why in (
        ("deepspeed" * bool(args.deepspeed), "it has an engine of its own"),
        ("fsdp" * bool(args.fsdp), "use ss.apply(…, parallel='fsdp') in a script of your own"),
        ("torch_compile" * bool(args.torch_compile), "a compiled model has no blocks to recompute"),
        ("auto_find_batch_size" * bool(args.auto_find_batch_size), "the plan keeps the batch size"),
        (
            "gradient_checkpointing" * bool(args.gradient_checkpointing),
            "the plan decides what is recomputed",
        ),
        (
            f"optim={optimizer!r}" * ("lomo" in optimizer or "layerwise" in optimizer),
            "it updates in the backward pass",
        ),
        (f"{args.n_gpu} GPUs in one process" * (args.n_gpu > 1), "start one for each by torchrun"),
    ):
        if told:
            raise InputError(f"a trainer by a plan cannot keep {told}", hint=f"turn it off: {why}")
