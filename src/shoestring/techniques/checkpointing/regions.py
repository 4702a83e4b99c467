"""Run parts of a model again in the backward pass, exactly as they ran the first time.

Regions are `torch.utils.checkpoint` without reentry: they nest, and running again stops as soon as
the last tensor that backward reads is there, so an operation whose output nobody reads again does
not run. Added here: BatchNorm's running statistics stay as the first pass left them
(pytorch#96136), what else the pass changes in its modules is put back while they are recomputed
(`module_state`), and a function that is marked `kept_for_second_pass` (statistics: small, and slow
to make) runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from ...torch_private.dispatch import without_modes
from ...torch_private.trees import tree_flatten, tree_map, tree_unflatten
from ..draws import observer
from ..function_writes import may_write
from ..saving import keeps_inputs
from .caches import refuse_caches
from .compared import CHECK, compare, comparing, inside
from .module_state import FirstPass, ModuleState


def region(
    run: Callable[..., Any], model: nn.Module, *args: Any, state: ModuleState | None = None
) -> Any:
    """Run now, keep only the tensors given, and recompute when backward needs the inside.

    `state` is of the modules that run, by default all of the model's.
    """
    kept: list[Any] = []
    leaves, spec = tree_flatten(args)
    refuse_caches(leaves)
    # A tensor that is computed when it is read: inside it would be computed in one pass only.
    leaves = [leaf.computed() if hasattr(type(leaf), "computed") else leaf for leaf in leaves]
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def rebuilt(*tensors: torch.Tensor) -> Any:
        filled = list(rest)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        return run(*tree_unflatten(filled, spec))

    state = state or ModuleState([model])
    first = state.watch(leaves[i] for i in places)
    compares = comparing()
    on_cuda = torch.cuda.is_initialized()
    streams = nullcontext if on_cuda or not _keeps_state() else shared_streams([])
    again = partial(Again, model, kept, first, streams, compares)
    with keeps_inputs(of_block=True), inside(model, state, first):
        out = checkpoint(
            rebuilt,
            *(leaves[i] for i in places),
            use_reentrant=False,
            preserve_rng_state=on_cuda and _keeps_state(),
            determinism_check=CHECK if compares else "default",
            context_fn=lambda: (_keeping(kept, first, compares), again()),
        )
    first.done()
    return out


def _keeps_state() -> bool:
    """Not in a CUDA graph: it cannot read the state of a generator."""
    known = observer()
    if known is not None:
        return known.keeps_state
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


_LATEST: WeakValueDictionary[str, torch.Tensor] = WeakValueDictionary()
"""The state of the CPU's generator that was kept last, while a region still keeps it."""


def shared_streams(devices: Sequence[int]) -> Callable[[], AbstractContextManager[Any]]:
    """Contexts in which PyTorch's generators go on from where they are now.

    PyTorch's own checkpoints copy the state of the CPU's generator, 5 KB, for every region. Here
    regions share one while nothing is drawn.
    """
    cpu, held = torch.get_rng_state(), _LATEST.get("cpu")
    with without_modes():  # it is not an operation of the step
        if held is not None and torch.equal(held, cpu):
            cpu = held
    _LATEST["cpu"] = cpu
    cuda = [torch.cuda.get_rng_state(device) for device in devices]

    @contextmanager
    def streams() -> Iterator[None]:
        with torch.random.fork_rng(devices):
            torch.set_rng_state(cpu)
            for device, state in zip(devices, cuda, strict=True):
                torch.cuda.set_rng_state(state, device)
            yield

    return streams


class Again:
    """Recomputation: puts the model's state back and notifies the observer.

    On CUDA PyTorch puts back the random streams; with `streams` it is done here.
    """

    def __init__(
        self,
        model: nn.Module,
        kept: Iterable[Any],
        first: FirstPass,
        streams: Callable[[], AbstractContextManager[Any]] = nullcontext,
        compares: bool = False,
    ) -> None:
        self._model, self._kept, self.first, self._streams = model, kept, first, streams
        self._compares = compares

    @classmethod
    def from_here(cls, model: nn.Module, state: ModuleState) -> Again:
        """For what runs next, outside of a checkpoint."""
        if not _keeps_state():
            return cls(model, (), state.watch(), _not_captured)
        devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
        return cls(model, (), state.watch(), shared_streams(devices))

    def first_pass(self) -> AbstractContextManager[Any]:
        """For the first pass, outside of a checkpoint: what it writes in place is copied."""
        return _keeping([], self.first)

    def __enter__(self) -> None:
        known = observer()
        self._contexts = ExitStack()
        self._contexts.enter_context(self._streams())
        self._contexts.enter_context(compare(self._compares))  # regions within, too
        self._contexts.callback(self.first.rewind())
        self._contexts.enter_context(self.first.unread())
        self._contexts.enter_context(frozen_statistics(self._model, self._kept))
        if known is not None:
            self._contexts.enter_context(known.again())

    def __exit__(self, *error: Any) -> bool:
        contexts = self._contexts
        del self._contexts
        return bool(contexts.__exit__(*error))


def _not_captured() -> AbstractContextManager[Any]:
    raise RuntimeError("a block that runs twice in one forward pass cannot be captured")


class _keeping(TorchFunctionMode):
    """The first pass: of what marked functions return, the mark says what the second needs.

    Tensors that functions will write in place are copied before, and generators of the user's own
    noted.
    """

    around_blocks = True

    def __init__(self, kept: list[Any], first: FirstPass, compares: bool = False) -> None:
        super().__init__()
        self._kept, self._first, self._compares = kept, first, compares

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if may_write(func) or "out" in kwargs:
            self._first.note(func, args, kwargs)
        if isinstance(kwargs.get("generator"), torch.Generator):
            self._first.note_draw(kwargs["generator"])
        if self._compares:
            self._first.running = func, args, kwargs
        try:
            result = func(*args, **kwargs)
        finally:
            self._first.running = None
        mark = getattr(func, "kept_for_second_pass", None)
        if mark is not None:
            self._kept.append(mark(result))
        return result


class frozen_statistics(TorchFunctionMode):
    """Normalizations run as in the first pass and write their running statistics to nowhere.

    In training they are written, not read, so a tensor of their shape stands in for them. Marked
    functions return what they returned in the first pass.
    """

    around_blocks = True
    freezes_statistics = True

    def __init__(self, model: nn.Module, kept: Iterable[Any] = ()) -> None:
        super().__init__()
        self._kept = iter(kept)
        self._model = model

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if hasattr(func, "kept_for_second_pass"):
            known = next(self._kept, None)
            return func(args[0], *tree_map(_stand_in, args[1:])) if known is None else known
        if func is torch.Tensor.add_ and _is_counter(args[0], self._model):
            return args[0]
        args, kwargs = without_statistics(func, args, kwargs)
        return func(*args, **kwargs)


_COUNTERS = WeakTensorKeyDictionary()
"""Of batches, in normalizations that were asked for; to ask each time takes long."""


def _is_counter(tensor: torch.Tensor, model: nn.Module) -> bool:
    if tensor.dim():
        return False
    if tensor not in _COUNTERS:
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                counter = module.num_batches_tracked
                if counter is not None:
                    _COUNTERS[counter] = True
    return tensor in _COUNTERS


def without_statistics(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with which a normalization leaves its running statistics alone."""
    name, default = _FROM_THE_BATCH.get(func, ("", False))
    if not kwargs.get(name, args[5] if name and len(args) > 5 else default):
        return tuple(args), kwargs
    return (
        tuple(_stand_in(a) if i in (1, 2) else a for i, a in enumerate(args)),
        {k: _stand_in(v) if k in _RUNNING else v for k, v in kwargs.items()},
    )


_FROM_THE_BATCH = {F.batch_norm: ("training", False), F.instance_norm: ("use_input_stats", True)}
"""The sixth argument says that the batch's own statistics are taken, and the running ones moved."""
_RUNNING = ("running_mean", "running_var")


def _stand_in(statistics: Any) -> Any:
    if not isinstance(statistics, torch.Tensor):
        return statistics
    return torch.full_like(statistics, torch.nan) if comparing() else torch.empty_like(statistics)
