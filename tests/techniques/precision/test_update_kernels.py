"""The update's kernels against PyTorch's arithmetic on FP32 copies, interpreted and on a GPU."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from interpreter import run_interpreted
from shoestring.kernels.rounding import Noise
from shoestring.techniques.precision import update as module
from shoestring.techniques.precision.scaling import LossScale
from shoestring.techniques.precision.update import NarrowUpdate

torch.set_num_threads(1)
SHAPES = [(5,), (20, 17), (20, 70), (8, 4, 3, 3), (20, 60, 1, 1)]
SETTINGS = {
    "adam": (torch.optim.Adam, {"betas": (0.9, 0.98), "weight_decay": 1e-2}),
    # Rates FP32 has exactly: of others, PyTorch's fused kernel on CUDA takes 1 - beta in FP32.
    "adamw": (torch.optim.AdamW, {"betas": (0.875, 1 - 2**-10), "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}),
    "heavy": (torch.optim.SGD, {"momentum": 0.9}),
    "plain": (torch.optim.SGD, {"weight_decay": 1e-2}),
}


def made(name: str, device: str, dtype: torch.dtype, stochastic: bool) -> NarrowUpdate:
    """Parameters of many shapes, one of them in FP32, in pieces of about 1,000 elements."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in SHAPES]
    parameters[3].data = parameters[3].data.contiguous(memory_format=torch.channels_last)
    parameters.append(nn.Parameter(torch.randn(40, device=device)))
    kind, settings = SETTINGS[name]
    groups = [{"params": parameters[:2], "lr": 0.02}, {"params": parameters[2:]}]
    if kind is not torch.optim.SGD:
        settings = {**settings, "lr": torch.full((), 0.01, device=device), "capturable": True}
    optimizer = kind(groups, **{"lr": 0.01, **settings})
    where = torch.device(device)
    scale = LossScale(where, 256.0, 1000) if dtype is torch.float16 else None
    update = NarrowUpdate(optimizer, scale, Noise(where, 3), stochastic=stochastic)
    update._elements = 1000
    return update


def parameters_of(update: NarrowUpdate) -> list[torch.Tensor]:
    return [p for group in update._optimizer.param_groups for p in group["params"]]


def give_gradients(update: NarrowUpdate, number: int) -> None:
    draw = torch.Generator().manual_seed(number)
    scaled = update._scale is not None
    for parameter in parameters_of(update):
        gradient = torch.randn(parameter.shape, generator=draw) * 10.0 ** -(number % 5)
        parameter.grad = torch.empty_like(parameter).copy_(gradient * (256.0 if scaled else 1.0))
        if parameter.shape[2:] == (1, 1):  # as a convolution of channels-last images has it
            channels = parameter.shape[1]
            strides = channels, 1, channels, channels
            parameter.grad = parameter.grad.as_strided(parameter.shape, strides)
    if scaled and number == 3:
        parameters_of(update)[2].grad[7, 7] = torch.inf


def compare(device: str, names: Iterable[str] = SETTINGS) -> None:
    """Four updates each way: the same random bits, so all but the last bit is the same."""
    seen_by = module.on_cuda
    for name in names:
        cases = [(torch.float16, True), (torch.bfloat16, True)]
        if name.startswith("adam"):  # SGD's is PyTorch's own fused kernel
            cases.append((torch.float16, False))
        if device == "cuda":  # the interpreter cuts BF16 off
            cases.append((torch.bfloat16, False))
        for dtype, stochastic in cases:
            with_kernels, copied = (made(name, device, dtype, stochastic) for _ in range(2))
            for number in range(4):
                for update, kernels in ((with_kernels, True), (copied, False)):
                    give_gradients(update, number)
                    module.on_cuda = lambda tensor, kernels=kernels: kernels
                    work = [(g, p) for g in update._optimizer.param_groups for p in g["params"]]
                    assert update._has_kernels(work) == kernels
                    update()
            module.on_cuda = seen_by
            case = f"{name}, {dtype}, {'stochastic' if stochastic else 'nearest'}"
            check(with_kernels, copied, dtype, case)


def check(found: NarrowUpdate, wanted: NarrowUpdate, dtype: torch.dtype, case: str) -> None:
    assert torch.equal(found._drawing.counter, wanted._drawing.counter)
    ulp = 2.0**-10 if dtype is torch.float16 else 2.0**-7
    for a, b in zip(parameters_of(found), parameters_of(wanted), strict=True):
        mine, theirs = found._optimizer.state[a], wanted._optimizer.state[b]
        assert mine.keys() == theirs.keys()
        if "step" in mine:
            assert mine["step"] == theirs["step"] == (3 if dtype is torch.float16 else 4)
        tensors = [key for key, value in mine.items() if isinstance(value, torch.Tensor)]
        pairs = {"values": (a, b), **{key: (mine[key], theirs[key]) for key in tensors}}
        for key, (x, y) in pairs.items():
            x, y = x.detach().float(), y.detach().float()
            assert torch.isfinite(x).all()
            far = (x - y).abs() / (ulp * y.abs().clamp_min(0.1 * y.abs().max()))
            if a.dim() == 4:  # in the order of memory, so each has its neighbor's random bits
                assert far.max() < 20, (case, key)
            else:
                others = int((far > 0.05).sum())
                found_here = (case, key, others, far.numel(), float(far.max()))
                assert far.max() < 5 and others <= max(1, 0.01 * far.numel()), found_here


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    run_interpreted(__file__, "compare('cpu')")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu() -> None:
    compare("cuda")
