"""Real tensors in a step on fake ones: what the loss uses beside the model stays as it is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..torch_private.autograd import current_node
from ..torch_private.dispatch import OperationMode, without_modes
from ..torch_private.fake_tensors import FakeTensor, FakeTensorMode
from ..torch_private.trees import tensor_leaves, tree_map
from .answers import PACKS, Answers, Reads, given, is_question, writes_masked
from .draws import is_single_draw, pinned
from .fakes import LATE, late_in_training
from .grouped import grouped_product
from .operand_types import check_types
from .values import asking, run

_aten = torch.ops.aten
_NUMBERS = frozenset(
    {
        *(_aten.rand.default, _aten.randn.default, _aten.randint.default, _aten.randint.low),
        *(_aten.zeros.default, _aten.ones.default, _aten.full.default),
    }
)
UNKNOWN = float(LATE)
"""For what an optimizer reads, a step count or another number."""
_LIFTS = (_aten.lift_fresh.default, _aten.lift_fresh_copy.default)


class Outside(OperationMode):
    """Entered right after the fake mode: keeps what is written and added to real tensors from them.

    The loss may use modules that are not the model's: a discriminator, a teacher. Their gradients
    are put back on leaving; those the step made live on with this object, as they would in
    training. A single number is made for real, so that it can be compared and read:
    `torch.rand([]) < self.layerdrop`. No generator of the user's is used, only the stream. Hugging
    Face asks the questions that `trace.values` can answer, until `stop_asking`. `answers` are those
    to all other questions.
    """

    def __init__(self, fake_mode: FakeTensorMode, *, answers: Answers | None = None) -> None:
        super().__init__()
        self._fake_mode = fake_mode
        self._gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._asked: list[bool] = []
        self._asking: AbstractContextManager[Any] = asking(self._asked)
        self._stepping = 0
        self._answers = answers
        self._reads = nullcontext() if answers is None else Reads(answers)

    def __enter__(self) -> Outside:
        self._asking.__enter__()
        self._steps = [
            register_optimizer_step_pre_hook(self._step_begins),
            register_optimizer_step_post_hook(self._step_ends),
        ]
        super().__enter__()
        self._reads.__enter__()
        return self

    @property
    def was_asked(self) -> bool:
        """Whether a question was answered that is not asked while a graph is captured."""
        return bool(self._asked)

    def stop_asking(self) -> None:
        """From now on as if a CUDA graph were captured, where nothing can be read."""
        self._asking.__exit__(None, None, None)
        self._asking = nullcontext()

    def _step_begins(self, optimizer: Any, *_: Any) -> None:
        self._stepping += 1
        stepped = (p for group in optimizer.param_groups for p in group["params"])
        known = [p for p in stepped if p in optimizer.state]
        if known and all(isinstance(p, FakeTensor) for p in known):
            with without_modes():
                late_in_training(optimizer)

    def _step_ends(self, *_: Any) -> None:
        self._stepping -= 1

    def __exit__(self, *error: Any) -> None:
        self._reads.__exit__(*error)
        super().__exit__(*error)
        for handle in self._steps:
            handle.remove()
        self._asking.__exit__(None, None, None)
        for key, (leaf, gradient) in self._gradients.items():
            self._gradients[key] = leaf, leaf.grad
            leaf.grad = gradient

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for often, and slow to answer further down
        if func.namespace == "profiler":  # the optimizer's name for each of its steps
            with without_modes():
                return func(*args, **kwargs)
        check_types(func, args)
        node: Any = current_node()
        if node is not None and node.name() == "torch::autograd::AccumulateGrad":
            leaf = node.variable
            if not isinstance(leaf, FakeTensor):
                self._gradients.setdefault(id(leaf), (leaf, leaf.grad))
        if func in _NUMBERS and _is_one_number(args, kwargs):
            with without_modes():
                real = func(*args, **kwargs)
                real = pinned(real, func, args) if is_single_draw(func, real) else real
                converter = self._fake_mode.fake_tensor_converter
                return converter.from_real_tensor(self._fake_mode, real, make_constant=True)
        if self._stepping and func is _aten._local_scalar_dense.default:
            if isinstance(args[0], FakeTensor) and args[0].constant is None:
                return UNKNOWN
        if (product := grouped_product(func, args, kwargs)) is not None:
            return product
        if writes_masked(func, args):  # its shape function would count
            return args[0] if func._schema.is_mutable else run(_aten.clone.default, args[:1], {})
        fake = any(issubclass(kind, FakeTensor) for kind in types)
        if is_question(func, args):
            if not fake and func is not PACKS:
                with without_modes():
                    return func(*args, **kwargs)
            answers = None if self._stepping else self._answers
            if answers is not None and (func, args) in answers:
                return given(answers, func, args, self._fake_mode)
        written = func._schema.is_mutable
        if fake or (not written and (not func.is_view or func in _LIFTS)):
            return run(func, args, kwargs)
        tensors = tensor_leaves((args, kwargs))
        if not tensors:
            return run(func, args, kwargs)
        if written:
            return self._written(func, tensors, args, kwargs)
        with without_modes():  # a view of a fake copy would count as memory of its own
            return func(*args, **kwargs)

    def _written(
        self, func: Any, tensors: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run in-place arithmetic on fake copies of the real tensors, which stay as they are."""
        with without_modes():
            fakes = {id(tensor): self._fake_mode.from_tensor(tensor) for tensor in tensors}
        given = {id(fakes[id(tensor)]): tensor for tensor in tensors}
        args, kwargs = tree_map(lambda leaf: fakes.get(id(leaf), leaf), (args, kwargs))
        out = func(*args, **kwargs)
        return tree_map(lambda leaf: given.get(id(leaf), leaf), out)


def _is_one_number(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    shape = next((a for a in (*args, kwargs.get("size")) if isinstance(a, (list, tuple))), None)
    device = kwargs.get("device")
    on_cpu = device is None or torch.device(device).type == "cpu"
    return shape is not None and all(extent == 1 for extent in shape) and on_cpu
