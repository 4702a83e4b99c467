"""A block's forward pass as compiled code; where nothing can be compiled, as its graphs.

    block(x)
      │ without gradients                  the block's own forward
      │ a fake tensor, or a mode that      the graphs that would be compiled, operation by
      │ follows every operation            operation (`graphs`)
      └ else                               compiled code, one for all blocks that are equal

The graphs are made in any case: they say whether the block draws random numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ...errors import InputError, first_line
from ...torch_private.autograd import preserved_version
from ...torch_private.compiling import (
    DeviceContext,
    compiled_whole,
    compiler_errors,
    function_mode_stack,
    operation_mode_stack,
    partitioned,
    with_state,
    without_function_modes,
)
from ...torch_private.dispatch import without_modes
from ...torch_private.fake_tensors import FakeTensorMode
from ...torch_private.trees import tree_flatten, tree_unflatten
from ...trace.attributes import held_by, put_back
from ...trace.fakes import is_fake
from .graphs import GraphRun

SHAPES = 64
"""Of inputs for which a block is compiled, before that is an error."""
_HINT = "leave out compiled_blocks, or name other blocks: CompiledBlocks(blocks=(…))"
_STATISTICS = nn.modules.batchnorm._NormBase
_DEVICES = ("cpu", "cuda")
_PLAIN = (int, float, complex, str, type(None), torch.dtype, torch.device)
"""Arguments by which a compiled function is known, beside tensors."""


class Blocks:
    """The blocks of one model, and what was made of them."""

    def __init__(self) -> None:
        self._graphs: dict[Any, Callable[..., Any]] = {}
        self._code: dict[Any, Callable[..., Any]] = {}
        self._ran: set[Any] = set()

    def replace(self, path: str, block: nn.Module) -> Callable[[], None]:
        """Another `forward` for a block; returns what takes it away."""
        own = block.__dict__.get("forward")
        made = _Block(path, block, block.forward, own is None)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return made.plain(*args, **kwargs)
            made.check()
            again = any(getattr(m, "freezes_statistics", False) for m in function_mode_stack())
            with without_function_modes(_runs_around), _frozen(block) if again else nullcontext():
                return self._run(made, args, kwargs)

        block.forward = forward

        def undo() -> None:
            if own is None:
                del block.forward
            else:
                block.forward = own

        return undo

    def _run(self, block: _Block, args: Any, kwargs: Any) -> Any:
        state, given = block.state(), _Given(block.path, args, kwargs)
        tensors = (*state.values(), *given.tensors)
        form = block.kind, block.mode(), given.form, tuple(map(_form, tensors))
        if any(map(is_fake, tensors)):
            return self._traced(form, block, given, state)(state, *given.tensors)
        if not all(map(_runs_around, operation_mode_stack())):  # values count: none for another
            return self._traced((form, id(block)), block, given, state)(state, *given.tensors)
        _check_modes(block.path)
        self._traced(form, block, given, state)  # says what would not be as plain
        code = self._code.get(block.kind)
        if code is None:
            code = self._code[block.kind] = compiled_whole(_fresh(_forward), SHAPES)
        plain = None if block.by_class else block.plain
        with without_modes(), _named(block.path), ExitStack() as stack:
            if form not in self._ran:  # the compiler warns of its own doings
                self._ran.add(form)
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
            return code(block.module, plain, args, kwargs)

    def _traced(self, key: Any, *of: Any) -> Callable[..., Any]:
        if key not in self._graphs:
            self._graphs[key] = _graphs(*of)
        return self._graphs[key]


class _Block:
    """A module whose forward is compiled, and the forward it had."""

    def __init__(self, path: str, module: nn.Module, plain: Any, by_class: bool) -> None:
        self.path, self.module, self.plain, self.by_class = path, module, plain, by_class
        self.kind = type(module), None if by_class else id(module), repr(module)
        """Equal for blocks that are built alike."""

    def state(self) -> dict[str, torch.Tensor]:
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}

    def mode(self) -> Any:
        """Beside shapes and types, on which the code depends."""
        cast = [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in _DEVICES]
        return tuple(m.training for m in self.module.modules()), tuple(cast)

    def check(self) -> None:
        """InputError if somebody works on what is inside."""
        for path, part in self.module.named_modules():
            hooks = path and (part._forward_hooks or part._forward_pre_hooks)
            if hooks or (part._backward_hooks and path) or (path and "forward" in part.__dict__):
                raise InputError(
                    f"{self.path}.{path} has {'hooks' if hooks else 'another forward'}, and the "
                    "block around it is compiled as one",
                    hint=_HINT,
                )
        for name, tensor in self.module.named_parameters():
            if type(tensor) is not nn.Parameter and not is_fake(tensor):
                raise InputError(
                    f"{self.path}.{name} is a {type(tensor).__name__}, not a plain parameter",
                    hint=_HINT,
                )
        if any(getattr(m, "sees_functions", False) for m in function_mode_stack()):
            raise InputError(
                f"{self.path} is compiled, and shows none of the functions inside of it",
                hint="recompute whole blocks (residual-1, or recompute in a schedule)",
            )


class _Given:
    """Arguments of a block, the tensors apart, each once."""

    def __init__(self, path: str, args: Any, kwargs: Any) -> None:
        leaves, self.spec = tree_flatten((args, kwargs))
        self.tensors: list[torch.Tensor] = []
        numbers: dict[int, int] = {}
        self.places: list[int] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in numbers:
                numbers[id(leaf)] = len(self.tensors)
                self.tensors.append(leaf)
            self.places.append(numbers[id(leaf)] if isinstance(leaf, torch.Tensor) else -1)
        self.rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        for tensor in self.tensors:
            if type(tensor) not in (torch.Tensor, nn.Parameter) and not is_fake(tensor):
                raise InputError(f"{path} is given a {type(tensor).__name__}", hint=_HINT)
        for leaf in self.rest:
            if not isinstance(leaf, _PLAIN):
                raise InputError(
                    f"{path} is given a {type(leaf).__name__}, which may hold anything", hint=_HINT
                )

    @property
    def form(self) -> Any:
        rest = tuple((type(leaf).__name__, leaf) for leaf in self.rest)
        return rest, tuple(self.places), str(self.spec)

    def function(self, block: _Block) -> Callable[..., Any]:
        """Of the block's tensors and those it is given; holds none of them."""
        rest, places, spec = self.rest, self.places, self.spec

        def run(state: dict[str, torch.Tensor], *tensors: torch.Tensor) -> Any:
            leaves = [
                other if place < 0 else tensors[place]
                for place, other in zip(places, rest, strict=True)
            ]
            args, kwargs = tree_unflatten(leaves, spec)
            with with_state(block.module, state):
                made = block.plain(*args, **kwargs)
                for name, buffer in block.module.named_buffers():
                    if state.get(name) is not buffer:
                        raise InputError(
                            f"{block.path}.{name} is another tensor after each pass", hint=_HINT
                        )
                return made

        return run


def _form(tensor: torch.Tensor) -> Any:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return tuple(tensor.shape), strides, tensor.dtype, str(tensor.device), tensor.requires_grad


def _forward(block: Any, plain: Any, args: Any, kwargs: Any) -> Any:
    if plain is None:  # that of its class, so that equal blocks share the code
        return type(block).forward(block, *args, **kwargs)
    return plain(*args, **kwargs)


def _fresh(function: Any) -> Any:
    """The same with code of its own: the compiler counts what it compiled for each."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def _graphs(block: _Block, given: _Given, state: dict[str, torch.Tensor]) -> Callable[..., Any]:
    """Traced on fake tensors of their own, outside of all modes that watch operations."""
    runs: list[GraphRun] = []

    def keep(graph: Any) -> GraphRun:
        runs.append(GraphRun(graph))
        return runs[-1]

    traced = partitioned(given.function(block), keep)
    known = next((t.fake_mode for t in (*given.tensors, *state.values()) if is_fake(t)), None)  # type: ignore[attr-defined]
    mode = known or FakeTensorMode(allow_non_fake_inputs=True)
    unseen = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
    held = [(module, held_by(module)) for module in block.module.modules()]
    with without_modes(), torch.random.fork_rng(devices=()), unseen, _named(block.path):
        with mode:
            like = {name: _like(t) for name, t in state.items()}
            tensors = [_like(t) for t in given.tensors]
        try:
            traced(like, *tensors)
        finally:  # tracing runs the block's own code
            for module, before in held:
                put_back(module, before)
    if any(run.draws for run in runs):
        raise InputError(
            f"{block.path} draws random numbers, and compiled code would draw others",
            hint="set its dropout to 0, leave out compiled_blocks, or name blocks without dropout",
        )
    return traced


def _like(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return made.requires_grad_(tensor.requires_grad)


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Within: an error of the compiler is one of the block's."""
    try:
        yield
    except compiler_errors() as error:
        raise InputError(
            f"{path} cannot be compiled as a whole: {first_line(error)}", hint=_HINT
        ) from None


@contextmanager
def _frozen(block: nn.Module) -> Iterator[None]:
    """Within: normalizations are recomputed, and their running statistics stay as they were."""
    held = [
        (buffer, buffer.clone())
        for module in block.modules()
        if isinstance(module, _STATISTICS)
        for buffer in module.buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for buffer, value in held:
            with torch.no_grad(), preserved_version(buffer):
                buffer.copy_(value)


def _runs_around(mode: Any) -> bool:
    """Whether a mode needs nothing of what runs inside of a block."""
    return getattr(mode, "around_blocks", False)


def _check_modes(path: str) -> None:
    for mode in function_mode_stack():
        if not isinstance(mode, DeviceContext):
            raise InputError(
                f"{path} is compiled, and {type(mode).__name__} would see none of its functions",
                hint=_HINT,
            )
