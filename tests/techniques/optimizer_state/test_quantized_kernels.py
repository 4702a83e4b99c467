"""The kernels of an update in few bits against the same in PyTorch, interpreted and on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from interpreter import run_interpreted
from shoestring.kernels.rounding import Noise
from shoestring.techniques.optimizer_state import update as module
from shoestring.techniques.optimizer_state.storage import MomentCodes
from shoestring.techniques.optimizer_state.update import QuantizedUpdate
from shoestring.techniques.precision.scaling import LossScale

torch.set_num_threads(1)
SHAPES = [(5,), (20, 17), (70, 40), (8, 4, 3, 3), (3000,), (20, 30, 1, 1)]
SETTINGS: dict[str, Any] = {
    "adam": (torch.optim.Adam, {"betas": (0.9, 0.98), "weight_decay": 1e-2}),
    "adamw": (torch.optim.AdamW, {"betas": (0.0, 0.999), "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}),
    "heavy": (torch.optim.SGD, {"momentum": 0.9, "maximize": True}),
    "plain": (torch.optim.SGD, {"weight_decay": 1e-2}),
}


def made(name: str, device: str, dtype: torch.dtype, bits: int) -> QuantizedUpdate:
    """Parameters of many shapes, one in channels-last, one too small for codes."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape).to(device, dtype)) for shape in SHAPES]
    parameters[3].data = parameters[3].data.contiguous(memory_format=torch.channels_last)
    kind, settings = SETTINGS[name]
    groups = [{"params": parameters[:2], "lr": 0.02}, {"params": parameters[2:]}]
    optimizer = kind(groups, lr=0.01, **settings)
    where = torch.device(device)
    scale = LossScale(where, 256.0, 1000) if dtype is torch.float16 else None
    return QuantizedUpdate(optimizer, MomentCodes(bits, 100), scale, Noise(where, 3))


def parameters_of(update: QuantizedUpdate) -> list[torch.Tensor]:
    return [p for group in update._optimizer.param_groups for p in group["params"]]


def give_gradients(update: QuantizedUpdate, number: int) -> None:
    draw = torch.Generator().manual_seed(number)
    scaled = update._scale is not None
    for parameter in parameters_of(update):
        gradient = torch.randn(parameter.shape, generator=draw) * 10.0 ** -(number % 3)
        parameter.grad = torch.empty_like(parameter).copy_(gradient * (256.0 if scaled else 1.0))
        if parameter.shape[2:] == (1, 1):  # as a convolution of channels-last images has it
            channels = parameter.shape[1]
            strides = channels, 1, channels, channels
            parameter.grad = parameter.grad.as_strided(parameter.shape, strides)
    if scaled and number == 2:
        parameters_of(update)[2].grad[7, 7] = torch.inf


def compare(device: str, names: Iterable[str] = SETTINGS, bits: Iterable[int] = (8, 4)) -> None:
    """Three updates each way: the same random bits, so few codes differ, by one."""
    seen_by = module.on_cuda
    for name in names:
        for width in bits:
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                with_kernels, copied = (made(name, device, dtype, width) for _ in range(2))
                for number in range(3):
                    for update, kernels in ((with_kernels, True), (copied, False)):
                        give_gradients(update, number)
                        module.on_cuda = lambda tensor, kernels=kernels: kernels
                        found = {update._has_kernels(p) for p in parameters_of(update)}
                        assert found == {kernels}
                        update()
                module.on_cuda = seen_by
                check(with_kernels, copied, dtype, f"{name}, {width} bits, {dtype}")


def check(found: QuantizedUpdate, wanted: QuantizedUpdate, dtype: torch.dtype, case: str) -> None:
    assert torch.equal(found._noise.counter, wanted._noise.counter)
    for a, b in zip(parameters_of(found), parameters_of(wanted), strict=True):
        mine, theirs = found._optimizer.state[a], wanted._optimizer.state[b]
        assert mine.keys() == theirs.keys(), case
        if "step" in mine:
            assert mine["step"] == theirs["step"] == (2 if dtype is torch.float16 else 3)
        for key, one in mine.items():
            other = theirs[key]
            assert one.dtype == other.dtype and one.shape == other.shape
            if one.dtype in (torch.int8, torch.uint8):
                differing = int((one != other).sum())
                assert differing <= max(3, 0.01 * one.numel()), (case, key, differing)
            else:
                torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-6, msg=f"{case} {key}")
        assert torch.isfinite(a).all()
        off = (a.detach().float() - b.detach().float()).abs()
        assert float(off.max()) < 0.03 and float(off.mean()) < 3e-4, (case, a.shape, off.max())


def test_strides_of_single_elements_keep_no_kernel_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a gradient of a convolution of 1 x 1 are its input's."""
    update = made("adamw", "cpu", torch.float32, 8)
    weight = nn.Parameter(torch.randn(8, 6, 1, 1))
    weight.grad = torch.empty_strided(weight.shape, (6, 1, 6, 6)).fill_(0.1)
    monkeypatch.setattr(module, "on_cuda", lambda tensor: True)
    assert update._has_kernels(weight)
    weight.grad = torch.empty_strided(weight.shape, (1, 8, 1, 1)).fill_(0.1)
    assert not update._has_kernels(weight)


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    run_interpreted(__file__, "compare('cpu')")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu() -> None:
    compare("cuda")
