"""Refuse models that cannot train in 16 bits, before anything is changed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

from ...errors import InputError
from ...trace.fakes import check_holds_only

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
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if any(parameter.grad is not None for parameter in held):
        raise InputError(
            "the parameters have gradients from before, which no loss scale has multiplied",
            hint="call optimizer.zero_grad() first",
        )


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
