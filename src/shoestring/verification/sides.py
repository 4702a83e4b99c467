"""The sides that a certificate compares: copies of a model that train for a few steps."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import InputError
from ..memory.live.measure import training_step
from ..step.apply import apply
from ..step.step import Step
from ..techniques.plan import Plan
from ..techniques.splitting.draws import Draw, Drawn, Slices
from ..techniques.splitting.units import weights
from ..trace.attributes import copied_model
from ..trace.batches import map_tensors, tensors_of
from ..trace.failures import other_model, user_code
from ..trace.fakes import check_optimizer, copied_optimizer, unwrapped
from ..trace.hooked import copy_gradient_hooks
from ..trace.split import cut, examples_of
from ..trace.streams import stream_states
from ..trace.tracing import Loss
from ..trace.wide import staying_wide, wide_batch, widened

Optimizer = torch.optim.Optimizer
WRAPPERS = (
    "_orig_mod",
    "module",
    "base_layer",
    "_checkpoint_wrapped_module",
    "_fsdp_wrapped_module",
)
"""Names of modules around a module, which its parameters' names are compared without."""
_PREFIX = "base_model.model."


@dataclass
class Trained:
    """The results of a few steps."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of the first step, before the update."""
    streams: list[Any] = field(default_factory=list)
    """Before the first step and after each."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    draws: list[list[Draw]] = field(default_factory=list)
    """Of each step, where they were recorded."""
    hidden: str | None = None
    """A kernel that kept its draws to itself."""
    unmatched: str | None = None
    """Draws of a part for which the whole batch has no rows."""
    narrowed: str | None = None
    """An operation that has no FP64 and ran in FP32."""

    def rows(self) -> dict[str, dict[Any, torch.Tensor]]:
        """The compared tensors, by name."""
        return {
            "loss": dict(enumerate(self.losses)),
            "gradients": dict(self.gradients),
            "buffers": dict(self.buffers),
            "optimizer state": dict(self.state),
            "parameters": dict(self.parameters),
        }

    def all(self) -> dict[Any, torch.Tensor]:
        """Every tensor of it."""
        rows = self.rows().items()
        return {f"{what} {name}": held for what, part in rows for name, held in part.items()}


class Side:
    """A copy of a model and its optimizer, state included, by the names it had."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, loss: Loss, *, wide: bool = False
    ) -> None:
        self.model, self.loss, self.wide = copied_model(model), loss, wide
        self._original = model
        # By their order: a scripted module copies its parameters without telling.
        pairs = zip(model.parameters(), self.model.parameters(), strict=True)
        mapping: dict[int, torch.Tensor] = {id(old): new for old, new in pairs}
        if any(not new.is_leaf for new in mapping.values()):  # nothing of it would be compared
            raise InputError(
                "a copy of the model does not train: torch.jit.script's modules copy that way",
                hint="verify the module as it was before it was scripted",
            )
        copy_gradient_hooks((old, mapping[id(old)]) for old in model.parameters())
        check_optimizer(optimizer)
        made = copied_optimizer(unwrapped(optimizer), mapping, {}, self._own)
        if not hasattr(made, "_optimizer_step_pre_hooks"):
            raise InputError(
                f"{type(made).__name__} is not built on torch.optim.Optimizer, so no hook can tell "
                "of its steps",
                hint="call super().__init__(parameters, defaults) in its __init__",
            )
        self.optimizer = made
        for parameter, state in optimizer.state.items():
            made.state[mapping[id(parameter)]] = copy.deepcopy(state)
        if wide:
            self._widen()
        self.named = {plain_name(name): p for name, p in self.model.named_parameters()}
        self.buffers = [name for name, _ in self.model.named_buffers()]

    def _own(self, held: torch.Tensor) -> torch.Tensor:
        """Of a tensor that the optimizer holds beside parameters and state."""
        return (widened(held) if self.wide else held).detach().clone()

    def _widen(self) -> None:
        """In place, so that the optimizer goes on holding the parameters."""
        self.model.double()
        for module in self.model.modules():
            for name, held in vars(module).items():
                if isinstance(held, torch.Tensor):
                    vars(module)[name] = widened(held)
        for state in self.optimizer.state.values():
            for key, held in state.items():
                if isinstance(held, torch.Tensor) and held.dim():
                    state[key] = widened(held)

    def run(self, batch: Any) -> torch.Tensor:
        """One step; its loss."""
        raise NotImplementedError

    def gradient(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """As plain training has it, with its zeros."""
        return gradient.detach().to_dense() if gradient.is_sparse else gradient.detach().clone()

    def meant(self, parameter: torch.Tensor, key: str, held: torch.Tensor) -> torch.Tensor | None:
        """A state tensor as it is meant; None for one that plain training does not have."""
        return held

    def drawing(self, number: int, batch: Any, made: Trained) -> AbstractContextManager[Any]:
        """Where the random numbers of a step come from; by default from the streams."""
        return nullcontext()

    def train(self, data: list[Any]) -> Trained:
        """A step for each batch."""
        made = Trained(streams=[stream_states()])
        before = _gradients(self._original)

        def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            made.gradients |= {
                name: self.gradient(name, p.grad)
                for name, p in self.named.items()
                if p.grad is not None
            }

        note.each_parameter = True  # type: ignore[attr-defined] # some may come before others
        handle = self.optimizer.register_step_pre_hook(note)
        for number, given in enumerate(data):
            batch = map_tensors(torch.clone, wide_batch(given) if self.wide else given)
            with user_code(), staying_wide() if self.wide else nullcontext() as mode:
                with self.drawing(number, batch, made) as draws:
                    if isinstance(draws, (Drawn, Slices)):
                        draws.puts_back = False  # the next step goes on from there
                    made.losses.append(self.run(batch).detach().clone())
                made.hidden = made.hidden or getattr(draws, "hidden", None)
                made.unmatched = made.unmatched or getattr(draws, "unmatched", None)
                made.narrowed = made.narrowed or getattr(mode, "narrowed", None)
            made.streams.append(stream_states())
            handle.remove()
            if _gradients(self._original) != before:  # the copies would compare as equal
                raise other_model("a copy of the model trains parameters of the model itself")
        buffers = dict(self.model.named_buffers())
        made.buffers = {
            plain_name(name): buffers[name].clone() for name in self.buffers if name in buffers
        }
        made.parameters = {name: p.detach().clone() for name, p in self.named.items()}
        for name, p in self.named.items():
            for key, held in self.optimizer.state.get(p, {}).items() if p.numel() else ():
                meant = self.meant(p, key, held) if isinstance(held, torch.Tensor) else None
                if meant is not None:
                    made.state[name, key] = meant.clone()
        return made


class Plain(Side):
    """As PyTorch trains. With `draws` it draws what another side drew; else it records."""

    draws: list[list[Draw]] | None = None

    def run(self, batch: Any) -> torch.Tensor:
        """Forward, backward, update."""
        return training_step(self.model, batch, self.loss, self.optimizer)

    def drawing(self, number: int, batch: Any, made: Trained) -> AbstractContextManager[Any]:
        """The whole batch's rows of what was drawn, or a record of what is."""
        if self.draws is not None:
            return Slices(self.draws[number], (0, 1), 1)
        drawn = Drawn()
        made.draws.append(drawn.draws)
        return drawn


class InParts(Plain):
    """The obvious loop over microbatches, to compare the technique with."""

    plan: Plan

    def run(self, batch: Any) -> torch.Tensor:
        """Forward and backward of each part, then one update."""
        examples = examples_of(batch) or 1
        size = self.plan.examples_at_once(batch) or examples
        parts = [cut(batch, start, start + size) for start in range(0, examples, size)]
        total = torch.zeros((), dtype=torch.float64)
        for part, weight in zip(parts, weights(self.plan.loss_units, parts), strict=True):
            if float(weight):
                self.select(part, batch)
                value = self.loss(self.model, part) * float(weight)
                value.backward()
                total += value.detach().double().cpu()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self.model.parameters():
            parameter.grad = None
        return total

    def drawing(self, number: int, batch: Any, made: Trained) -> AbstractContextManager[Any]:
        """Each part draws its rows of what the whole batch drew."""
        assert self.draws is not None
        self._slices = Slices(self.draws[number], (0, 1), examples_of(batch) or 1)
        self._rewind = _host_streams()
        return self._slices

    def select(self, part: Any, batch: Any) -> None:
        """Go on with the draws of this part."""
        self._slices.select(rows_of(part, batch))
        self._rewind()


class Planned(Side):
    """As the plan says. With `draws`, microbatches draw their rows of what the batch drew."""

    def __init__(
        self, plan: Plan, model: nn.Module, optimizer: Optimizer, loss: Loss, *, wide: bool = False
    ) -> None:
        super().__init__(model, optimizer, loss, wide=wide)
        self.step: Step = apply(plan, self.model, self.optimizer, loss=loss)
        self._meanings = self.step._setup.meanings
        self.draws: list[list[Draw]] | None = None
        self._slices: Slices | None = None

    def share(self, draws: list[list[Draw]]) -> None:
        """Let parts draw what the whole batch drew."""
        self.draws = draws
        self.step.use_graph(False)
        split = self.step._setup.split

        def selecting(batch: Any) -> Iterator[Any]:
            rewind = _host_streams()
            for part, weight in split(batch):
                if self._slices is not None:
                    self._slices.select(rows_of(part, batch))
                    rewind()
                yield part, weight

        self.step._setup.split = selecting

    def drawing(self, number: int, batch: Any, made: Trained) -> AbstractContextManager[Any]:
        """The rows of each part, as it comes."""
        if self.draws is None or number >= len(self.draws):
            self._slices = None
            return nullcontext()
        self._slices = Slices(self.draws[number], (0, 1), examples_of(batch) or 1)
        return self._slices

    def run(self, batch: Any) -> torch.Tensor:
        """One step of the plan."""
        return self.step(batch)

    @property
    def scale(self) -> torch.Tensor | None:
        """The factor of the loss."""
        return self.step.loss_scale

    def gradient(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Without the loss scale."""
        scale = self.scale
        return super().gradient(name, gradient if scale is None else gradient / scale)

    def meant(self, parameter: torch.Tensor, key: str, held: torch.Tensor) -> torch.Tensor | None:
        """As the techniques say."""
        found: torch.Tensor | None = held
        beside = self.optimizer.state[parameter]
        for meaning in self._meanings:
            found = None if found is None else meaning.state(parameter, key, found, beside)
        return found

    def as_held(self, name: str, plain: torch.Tensor) -> torch.Tensor:
        """A tensor of plain training as this side holds it."""
        for meaning in self._meanings:
            plain = meaning.expected(name, plain)
        return plain

    def prepare_plain(self, side: Side) -> bool:
        """Change a plain copy so that its gradients compare; whether anything changed."""
        return any([meaning.prepare_plain(side.named) for meaning in self._meanings])

    def expected(self, plain: Trained) -> dict[str, dict[Any, torch.Tensor]]:
        """The results of plain training, in the form this side has."""
        rows = plain.rows()
        rows["parameters"] = {n: self.as_held(n, t) for n, t in plain.parameters.items()}
        rows["optimizer state"] = {k: self.as_held(k[0], t) for k, t in plain.state.items()}
        return rows


def rows_of(part: Any, batch: Any) -> tuple[int, int]:
    """Which examples of the batch a part has, from where its views begin."""
    count = examples_of(part) or 1
    for own, whole in zip(tensors_of(part), tensors_of(batch), strict=True):
        if (
            whole.dim()
            and whole.stride(0)
            and own.untyped_storage()._cdata == (whole.untyped_storage()._cdata)
        ):
            start = (own.storage_offset() - whole.storage_offset()) // whole.stride(0)
            return start, start + count
    return 0, count


def _gradients(model: nn.Module) -> list[tuple[int, int] | None]:
    """Which gradients there are, and how often each was written."""
    found = (parameter.grad for parameter in model.parameters())
    return [None if g is None else (id(g), g._version) for g in found]


def plain_name(name: str) -> str:
    """A parameter's name without the wrappers around its modules."""
    kept = [part for part in name.removeprefix(_PREFIX).split(".") if part not in WRAPPERS]
    return ".".join(kept)


def _host_streams() -> Callable[[], None]:
    """Takes Python's and NumPy's streams back: a part draws there what the whole batch drew."""
    held = random.getstate(), np.random.get_state()

    def rewind() -> None:
        random.setstate(held[0])
        np.random.set_state(held[1])

    return rewind
