"""Nothing of the user's changes: what a trial step touches beside copies is put back after it.

A step may touch more than the model and the optimizer it is given. The loss may call another
network (a discriminator, a teacher, a moving average), step its optimizer, count its calls; a hook
may append to a list. Two contexts cover that:

`Bystanders`  Python's side: attributes of modules, state of optimizers, what the loss and hooks
              refer to, `tensor.data = …`. Enough on fake tensors, which write nothing.
`Untouched`   the same, and memory: the first write to a storage that was there before is preceded
              by a copy of it, the first draw from a generator by its state. For steps on real
              tensors.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import InputError
from ..torch_private.dispatch import OperationMode, without_modes
from ..torch_private.fake_tensors import FakeTensor
from ..torch_private.trees import tensor_leaves
from .attributes import held_by, put_back
from .fakes import same_random_streams
from .hooked import gradient_hooks
from .memoized import forgets_fakes
from .places import is_passing
from .reached import Reached

_RUNNING = ("running_mean", "running_var")
"""Arguments that normalizations write, though their schemas do not say so."""
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class Bystanders:
    """Modules that are called and optimizers that step inside, and what the functions refer to."""

    def __init__(
        self, functions: Iterable[Callable[..., Any]], ours: Iterable[nn.Module] = ()
    ) -> None:
        models = list(ours)
        self._reached = Reached(functions)
        self._ours = {id(module) for model in models for module in model.modules()}
        self._trained = {id(p) for model in models for p in model.parameters()}
        held = {id(buffer) for model in models for buffer in model.buffers()}
        self._data = _DataNoted(self._trained | held)
        self._modules: dict[int, tuple[nn.Module, Any]] = {}
        self._optimizers: dict[int, tuple[Any, Any]] = {}

    def __enter__(self) -> Bystanders:
        self._handles = [
            register_module_forward_pre_hook(self._called),
            register_optimizer_step_pre_hook(self._stepped),
        ]
        self._data.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._data.__exit__(*error)
        for handle in self._handles:
            handle.remove()
        self.restore()

    def restore(self) -> None:
        """Put everything back; may be called again."""
        for tensor, data in self._data.before.values():
            tensor.data = data
        for module, held in self._modules.values():
            put_back(module, held)
        for optimizer, held in self._optimizers.values():
            _put_back_optimizer(optimizer, held)
        self._reached.restore()

    def _called(self, module: nn.Module, _: Any) -> None:
        if id(module) in self._ours or id(module) in self._modules:
            return
        for inner in module.modules():  # whose hooks its forward may set before it calls them
            if id(inner) not in self._ours and id(inner) not in self._modules:
                self._modules[id(inner)] = inner, held_by(inner)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if id(optimizer) in self._optimizers:
            return
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        if not isinstance(first, FakeTensor) and id(first) not in self._trained:
            self._optimizers[id(optimizer)] = optimizer, _held_by_optimizer(optimizer)


class _DataNoted(TorchFunctionMode):
    """Notes what tensors were before `tensor.data = …`, which no operation shows.

    A real tensor is not made fake: it would be neither.
    """

    def __init__(self, ours: Collection[int]) -> None:
        super().__init__()
        self._ours = ours
        self.before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if data_is_set(func) and not isinstance(args[0], FakeTensor):
            tensor, data = args
            if isinstance(data, FakeTensor):
                return None
            if id(tensor) not in self._ours:
                self.before.setdefault(id(tensor), (tensor, tensor.data))
        return func(*args, **(kwargs or {}))


def _held_by_optimizer(optimizer: Any) -> Any:
    state = {owner: (held, dict(held)) for owner, held in optimizer.state.items()}
    groups = [(group, dict(group)) for group in optimizer.param_groups]
    return dict(optimizer.__dict__), state, groups


def _put_back_optimizer(optimizer: Any, held: Any) -> None:
    attributes, state, groups = held
    optimizer.__dict__.clear()
    optimizer.__dict__.update(attributes)
    optimizer.state.clear()
    for owner, (entries, content) in state.items():
        entries.clear()
        entries.update(content)
        optimizer.state[owner] = entries
    for group, content in groups:
        group.clear()
        group.update(content)


class Untouched(OperationMode):
    """Copies what is there before it is written, and puts it back on leaving.

    `ours` are models and tensors of the trial itself, which may change.
    """

    def __init__(
        self, functions: Iterable[Callable[..., Any]], ours: Iterable[nn.Module] = ()
    ) -> None:
        super().__init__()
        models = list(ours)
        self._bystanders = Bystanders(functions, models)
        tensors = [t for model in models for t in (*model.parameters(), *model.buffers())]
        self._known: dict[int, Any] = {}
        """Storages made inside, and ours."""
        for tensor in tensors:
            self._note(tensor)
        self._copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._sizes: list[tuple[torch.Tensor, torch.Size]] = []
        """Kernels that watch ranges of channels resize what was empty before the first step."""
        self._gradients: MutableMapping[torch.Tensor, torch.Tensor | None]
        self._gradients = WeakTensorKeyDictionary()
        """Of leaves; one that a step makes itself (a view of its batch) ends with the step."""
        self._generators: dict[torch.Generator, torch.Tensor] = {}

    def __enter__(self) -> Untouched:
        self._bystanders.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.restore()
        self._bystanders.__exit__(*error)

    def restore(self) -> None:
        """Put everything back; may be called again."""
        for leaf, gradient in self._gradients.items():
            leaf.grad = gradient
        for storage, held in self._copies.values():
            if storage.nbytes() != held.nbytes():
                storage.resize_(held.nbytes())
            storage.copy_(held)
        with torch.no_grad():
            for tensor, size in self._sizes:
                if tensor.size() != size:
                    tensor.resize_(size)
        for generator, state in self._generators.items():
            generator.set_state(state)
        self._bystanders.restore()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for leaf in tensor_leaves((args, kwargs)):
            if leaf.requires_grad and leaf.is_leaf:
                self._look_at(leaf)
        for tensor in _written(func, args, kwargs):
            self._save(tensor)
        if torch.Tag.nondeterministic_seeded in func.tags:
            for given in (*args, *kwargs.values()):
                if isinstance(given, torch.Generator) and given not in self._generators:
                    self._generators[given] = given.get_state()
        out = func(*args, **kwargs)
        for leaf in tensor_leaves(out):
            self._made(leaf, args, kwargs)
        return out

    def _look_at(self, leaf: torch.Tensor) -> None:
        key = _key(leaf)
        if key is not None and key not in self._known and leaf not in self._gradients:
            self._gradients[leaf] = leaf.grad

    def _save(self, tensor: torch.Tensor) -> None:
        key = _key(tensor)
        if key is None or key in self._known or key in self._copies or is_passing(tensor):
            return
        storage = tensor.untyped_storage()
        self._sizes.append((tensor, tensor.size()))
        with without_modes():  # on the host: the trial may be measured
            self._copies[key] = storage, storage.cpu() if tensor.is_cuda else storage.clone()

    def _made(self, tensor: torch.Tensor, args: Any, kwargs: Any) -> None:
        key = _key(tensor)
        if key is None or key in self._known or key in self._copies:
            return
        if all(_key(leaf) != key for leaf in tensor_leaves((args, kwargs))):
            self._note(tensor)

    def _note(self, tensor: torch.Tensor) -> None:
        key = _key(tensor)
        if key is None:
            return
        known = self._known

        def gone(_: Any) -> None:
            known.pop(key, None)

        known[key] = weakref.ref(tensor.untyped_storage(), gone)


def data_is_set(func: Any) -> bool:
    """`tensor.data = other`."""
    return bool(func == _SET_DATA)


def _key(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # no storage of its own
        return None


class WritesElsewhere(InputError):
    """A step that would change what cannot be put back; it says nothing of the plan."""


class NotWritten(OperationMode):
    """Within: an operation that would write to one of these storages raises an error instead."""

    around_blocks = True

    def __init__(self, storages: Collection[int]) -> None:
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(_key(tensor) in self._storages for tensor in _written(func, args, kwargs)):
            raise WritesElsewhere(
                "the loss writes to tensors that are not the model's",
                hint="apply the plan: it was predicted, not tried",
            )
        return func(*args, **kwargs)


def storages_of(model: nn.Module) -> frozenset[int]:
    """Of its parameters and buffers."""
    keys = (_key(tensor) for tensor in (*model.parameters(), *model.buffers()))
    return frozenset(key for key in keys if key is not None)


def storages_now() -> frozenset[int]:
    """Of all tensors that Python holds."""
    held = (o for o in gc.get_objects() if issubclass(type(o), torch.Tensor))
    return frozenset(key for tensor in held if (key := _key(tensor)) is not None)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for position, name in _writes(func):
        yield from tensor_leaves(args[position] if position < len(args) else kwargs.get(name))


@cache
def _writes(func: Any) -> tuple[tuple[int, str], ...]:
    """Which of an operation's arguments it writes to: places and names."""
    normalizes = "batch_norm" in func._opname
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (normalizes and argument.name in _RUNNING)
    )


def hooks_of(model: nn.Module) -> list[Callable[..., Any]]:
    """The functions that are called beside the forward and backward passes of a model."""
    of_modules = [
        hook
        for module in model.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        for hook in getattr(module, name, {}).values()
    ]
    return of_modules + [
        h for p in model.parameters() for hooks in gradient_hooks(p) for h in hooks
    ]


@contextmanager
def nothing_changes(model: nn.Module, loss: Callable[..., Any]) -> Iterator[None]:
    """Around a step on fake tensors, of a fake copy of the model."""
    others = Bystanders([loss, *hooks_of(model)])
    with same_random_streams(), forgets_fakes(model, loss), others:
        yield


@contextmanager
def as_it_was(model: nn.Module, watching: AbstractContextManager[Any]) -> Iterator[None]:
    """Around steps on the model itself: its attributes, gradients and the streams are put back.

    `watching` takes back the rest: `Untouched`, or `Bystanders` where somebody has the weights.
    """
    modules = [(module, held_by(module)) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    with warnings.catch_warnings(), same_random_streams():
        warnings.simplefilter("ignore")
        try:
            with watching:
                yield
        finally:
            for module, held in modules:
                put_back(module, held)
            for parameter, gradient in gradients:
                parameter.grad = gradient
