"""The graphs that `torch.compile` makes of a function, and the context compiled code runs in."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch.nn.utils.stateless import _reparametrize_module as with_state
from torch.overrides import TorchFunctionMode
from torch.overrides import _get_current_function_mode_stack as function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as operation_mode_stack

from .dispatch import function_modes, without_innermost_function_mode
from .fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

Run = Callable[[list[Any]], Any]
"""Runs a graph on its inputs, which it takes out of their list."""


@contextmanager
def without_function_modes(goes: Callable[[TorchFunctionMode], bool]) -> Iterator[None]:
    """Within: modes that see every function are off where `goes` says so."""
    found: list[Any] = []
    with ExitStack() as stack:
        while function_modes():
            found.append(stack.enter_context(without_innermost_function_mode()))
        for mode in reversed(found):
            if not goes(mode):
                stack.enter_context(mode)
        yield


def as_inductor() -> dict[str, Any]:
    """How TorchInductor decomposes a graph, changes it, and cuts it in two."""
    with warnings.catch_warnings():  # of what it imports
        warnings.simplefilter("ignore")
        from torch._guards import detect_fake_mode
        from torch._inductor.compile_fx import partition_fn
        from torch._inductor.decomposition import select_decomp_table
        from torch._inductor.virtualized import V

    def cut(joint: fx.GraphModule, inputs: Any, **more: Any) -> Any:
        with V.set_fake_mode(detect_fake_mode(inputs)):
            return partition_fn(joint, inputs, **more)

    return {"partition_fn": cut, "decompositions": select_decomp_table()}


def partitioned(function: Callable[..., Any], runs: Callable[[fx.GraphModule], Run]) -> Any:
    """A function of tensors as TorchInductor has it: decomposed, its passes made, and cut in two.

    Forward and backward are graphs of operations, cut where the min-cut partitioner says: what
    goes from the first to the second is what compiled code saves. `runs` makes of each graph what
    runs it. The function is traced in its first call, on fake tensors.
    """
    from torch._functorch.aot_autograd import aot_function

    def boxed(gm: fx.GraphModule, example_inputs: Any) -> Any:
        run = runs(gm)

        def call(given: list[Any]) -> Any:
            return run(given)

        call._boxed_call = True  # type: ignore[attr-defined]  # it frees inputs as it goes
        return call

    return aot_function(
        function,
        fw_compiler=boxed,
        bw_compiler=boxed,
        inference_compiler=boxed,
        **as_inductor(),
        keep_inference_input_mutations=True,
    )


def compiled_whole(
    function: Callable[..., Any], shapes: int, backend: Any = "inductor"
) -> Callable[..., Any]:
    """`torch.compile` without breaks, anew for up to so many shapes, then an error."""
    from torch._dynamo import config

    made = torch.compile(function, fullgraph=True, dynamic=False, backend=backend)

    def run(*args: Any) -> Any:
        with config.patch(recompile_limit=shapes):
            return made(*args)

    return run


def compiler_errors() -> tuple[type[Exception], ...]:
    """Raised by `torch.compile` for code that it cannot compile."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    return (
        TorchDynamoException,
        InductorError,
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
    )


__all__ = [
    "DeviceContext",
    "Run",
    "compiled_whole",
    "compiler_errors",
    "function_mode_stack",
    "operation_mode_stack",
    "partitioned",
    "with_state",
    "without_function_modes",
]
