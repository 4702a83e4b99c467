"""Refuse models that cannot train in 16 bits, before anything is changed."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from ...errors import InputError
from ...torch_private.dispatch import without_modes
from ...trace.fakes import (
    check_holds_only,
    copied_optimizer,
    same_random_streams,
)
from ...trace.hooked import gradient_hooks
from .reference_copy import reference_copy

_NAMES = {torch.float16: "FP16", torch.bfloat16: "BF16"}


def check_model(model: nn.Module, dtype: torch.dtype) -> None:
    """One device that multiplies matrices of this type, and no module known not to work in it."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        raise InputError(
            f"the model lies on {', '.join(sorted(map(str, devices)))}", hint="put it on one device"
        )
    (device,) = devices
    try:
        probe = torch.ones(2, 2, dtype=dtype, device=device)
        probe @ probe
    except RuntimeError as error:
        raise InputError(
            f"{device} does not multiply matrices in {_NAMES[dtype]}",
            hint="train in fp32 there, or on another device",
        ) from error
    for path, module in model.named_modules():
        if isinstance(module, nn.CTCLoss):
            raise InputError(
                f"{path or 'CTCLoss'} has no {_NAMES[dtype]} kernel",
                hint="take the loss outside of the model, of outputs.float()",
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise InputError(
                f"{path} makes sparse gradients, which have no {_NAMES[dtype]} update",
                hint="build it with sparse=False",
            )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Its parameters are the model's, have no gradient yet, and it steps without a closure."""
    check_holds_only(optimizer.param_groups, {id(p) for p in model.parameters()})
    if any(parameter.grad is not None for parameter in _held(optimizer)):
        raise InputError(
            "the parameters have gradients from before, which no loss scale has multiplied",
            hint="call optimizer.zero_grad() first",
        )
    check_alone(optimizer)


def sees_scaled(model: nn.Module) -> str | None:
    """Which hook of the user's would see gradients multiplied by a loss scale."""
    for name, parameter in model.named_parameters():
        if any(gradient_hooks(parameter)):
            return f"a hook on the gradient of {name}"
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            return f"a backward hook of {path or type(module).__name__}"
    return None


def check_hooks(model: nn.Module) -> None:
    """Where there is a loss scale, nobody may look at gradients before it is taken off."""
    found = sees_scaled(model)
    if found is not None:
        raise misled(found)


def misled(hook: str) -> InputError:
    """The refusal of a hook that changes, or may change, gradients by what they are."""
    return InputError(
        f"{hook} would see gradients times FP16's loss scale",
        hint="bf16 has no loss scale; or clip by clip= and remove the hook",
    )


def check_alone(optimizer: torch.optim.Optimizer) -> None:
    """It moves each parameter by that one's gradient and state alone, as the update calls it.

    Counts of steps, averages and estimates that it keeps elsewhere would be wrong in silence. It
    is tried on small tensors.
    """
    if type(optimizer).__module__.partition(".")[0] in _PARAMETER_BY_PARAMETER:
        return
    try:
        with without_modes(), same_random_streams():
            alone = _moves_each_alone(optimizer)
    except Exception:  # of other shapes it can do nothing
        alone = False
    if not alone:
        raise InputError(
            f"{type(optimizer).__name__} needs more than a parameter's gradient and state to "
            "update it, such as a count of its own: 16 bits update one parameter after the other",
            hint="keep it in optimizer.state[parameter], or train in fp32: allow='lossless'",
        )


_PARAMETER_BY_PARAMETER = ("torch", "bitsandbytes", "torchao")
"""Libraries whose optimizers are known to do so."""
_SMALL = 2**12


def _moves_each_alone(optimizer: torch.optim.Optimizer) -> bool:
    together, apart = _small_copy(optimizer), _small_copy(optimizer)
    alone = reference_copy(apart)
    drawn = torch.Generator().manual_seed(0)
    states: dict[torch.Tensor, Any] = {}
    for _ in range(3):
        for one, other in zip(_held(together), _held(apart), strict=True):
            one.grad = torch.randn(one.shape, generator=drawn)
            other.grad = one.grad.clone()
        with same_random_streams():
            together.step()
        for group in apart.param_groups:
            for parameter in group["params"]:
                wide = parameter.detach().clone()  # as the update makes one of 16 bits
                wide.grad = parameter.grad
                alone.param_groups = [{**group, "params": [wide]}]
                alone.state = defaultdict(dict, {wide: states.get(parameter, {})})
                alone.step()
                states[parameter] = alone.state[wide]
                parameter.data = wide
    pairs = zip(_held(together), _held(apart), strict=True)
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-7) for one, other in pairs)


def _small_copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    def own(held: torch.Tensor) -> torch.Tensor:
        if held.numel() > _SMALL:
            raise ValueError("an average of weights, or the like")
        return held.detach().clone()

    small: dict[int, torch.Tensor] = {
        id(p): nn.Parameter(torch.full((4, 3), 0.5)) for p in _held(optimizer)
    }
    made = copied_optimizer(optimizer, small, {}, own)
    for group in made.param_groups:
        group["params"] = group["params"][:2]
    return made


def _held(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@contextmanager
def named_failures(dtype: torch.dtype) -> Iterator[None]:
    """An operation without a kernel, or one given two types, in one line with a way out."""
    try:
        yield
    except CheckpointError:  # it lists types, and is about something else
        raise
    except RuntimeError as error:
        text = str(error)
        missing = re.search(r'"(\w+)" not implemented for \'(?:Half|BFloat16)\'', text)
        if missing:
            raise InputError(
                f"the model uses {missing[1]}, which has no {_NAMES[dtype]} kernel on this device",
                hint="compute that part in FP32: .float() before it",
            ) from error
        if re.search(r"\bd?type\b", text) and re.search(r"Half|BFloat16|float16", text):
            raise InputError(
                f"the model mixes {_NAMES[dtype]} with another type: {text.splitlines()[0]}",
                hint="make new tensors in the type of another: torch.zeros(…, dtype=x.dtype)",
            ) from error
        raise
