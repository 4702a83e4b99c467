"""BatchNorm with its ReLU in one function: the kernels, and which modules are taken together."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interpreter import run_interpreted
from shoestring.step.apply import apply
from shoestring.step.step import Step
from shoestring.techniques import Checkpointing, Microbatching, Precision, batch_norm
from shoestring.techniques.batch_norm import NormSettings, inner, normalize, statistics

BESIDE = {4: torch.channels_last, 5: torch.channels_last_3d}
NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
ROWS = [(7, 5), (4, 32, 9, 7), (3, 130, 5, 5), (2, 5, 3, 4, 3), (300, 16), (2, 16, 32, 32)]
"""Shapes in which the channels of a pixel lie beside each other."""
IMAGES = [(5, 3, 7), (3, 4, 9, 7), (5, 2, 32, 32), (2, 3, 3, 4, 3), (2, 9, 1, 3)]
"""Shapes of contiguous tensors."""
TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def cases(device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and gradients of all kinds, shapes and layouts."""
    torch.manual_seed(0)
    for kind in TOLERANCES:
        few = None if kind is torch.float32 else 2
        shapes = [(shape, BESIDE.get(len(shape))) for shape in ROWS[:few]]
        shapes += [(shape, None) for shape in IMAGES[:few]]
        if device == "cpu":  # slow, and small tiles show what large tensors would
            shapes = [(shape, form) for shape, form in shapes if math.prod(shape) < 2000]
        for shape, form in shapes:
            x, grad = 3 + 2 * torch.randn(shape, device=device), torch.randn(shape, device=device)
            laid = {"dtype": kind, "memory_format": form or torch.contiguous_format}
            yield x.to(**laid), grad.to(**laid)


def compare(device: str, most: int | None = None) -> None:
    """Outputs, running statistics and gradients against PyTorch's own in FP64."""
    close = torch.testing.assert_close
    for x, grad in itertools.islice(cases(device), most):
        beside = x.is_contiguous() and x.dim() > 2
        assert inner(x) == (x[0, 0].numel() if beside else 1)
        for rectify in (False, True) if x.dtype is torch.float32 else (True,):
            plain = NORMS[x.dim()](x.shape[1]).to(device)
            with torch.no_grad():
                plain.weight.normal_(1, 0.3)
                plain.bias.normal_(0.2, 0.3)
            mean, var = plain.running_mean.clone(), plain.running_var.clone()
            counter = torch.zeros((), dtype=torch.int64, device=device)
            weight = plain.weight.detach().clone().requires_grad_()
            bias = plain.bias.detach().clone().requires_grad_()
            ours = x.clone().requires_grad_()
            batch = statistics(ours, (mean, var, counter))
            settings = NormSettings(0.1, plain.eps, rectify)
            out = normalize(ours, weight, bias, batch, settings)
            out.backward(grad)
            plain.double()
            theirs = x.double().requires_grad_()
            expected = plain(theirs)
            expected.backward(grad.double() * (out.detach() > 0) if rectify else grad.double())
            tolerance = TOLERANCES[x.dtype]
            near = {"atol": tolerance, "rtol": tolerance}
            close(out.double(), F.relu(expected) if rectify else expected, **near)
            close(mean.double(), plain.running_mean, atol=1e-6, rtol=1e-5)
            close(var.double(), plain.running_var, atol=1e-6, rtol=1e-5)
            assert int(counter) == 1
            assert out.stride() == ours.grad.stride() == x.stride()
            close(ours.grad.double(), theirs.grad, **near)
            close(weight.grad.double(), plain.weight.grad, atol=1e-4, rtol=tolerance)
            close(bias.grad.double(), plain.bias.grad, atol=1e-4, rtol=tolerance)
            again = normalize(x, weight, bias, batch.known(), settings)
            assert torch.equal(again, out) and int(counter) == 1, "a second pass, the same bits"


def compare_not_a_number(device: str) -> None:
    """One that comes in is seen behind the ReLU, in its channel, and so is its gradient."""
    x = torch.randn(3, 2, 5, device=device)
    x[0, 1, 0] = torch.nan
    x.requires_grad_()
    one = torch.ones(2, device=device)
    running = one.clone(), one.clone(), torch.zeros((), dtype=torch.int64, device=device)
    out = normalize(x, one, one, statistics(x, running), NormSettings(0.1, 1e-5, True))
    out.sum().backward()
    for made in (out, x.grad):
        assert made[:, 0].isfinite().all() and made[:, 1].isnan().all()


def compare_groups(device: str, *, small: bool = False) -> None:
    """Three groups at once against one after the other."""
    torch.manual_seed(1)
    settings = NormSettings(0.1, 1e-5, True)
    plain, beside = torch.contiguous_format, torch.channels_last
    shapes = [((12, 7), plain), ((6, 5, 7), plain), ((6, 3, 7, 12), plain)]
    shapes += [((6, 9, 4, 4), beside)] if small else [((6, 140, 2, 2), beside)]
    for kind in (torch.float32,) if small else (torch.float16, torch.float32):
        for shape, form in shapes:
            x = (1 + torch.randn(shape, device=device)).to(kind).contiguous(memory_format=form)
            grad = torch.randn_like(x)
            made = []
            for groups in (3, 1):
                weight = torch.linspace(0.5, 2, shape[1], device=device).requires_grad_()
                bias = torch.zeros(shape[1], device=device, requires_grad=True)
                running = (
                    torch.zeros(shape[1], device=device),
                    torch.ones(shape[1], device=device),
                    torch.zeros((), dtype=torch.int64, device=device),
                )
                ours = x.clone().requires_grad_()
                parts = [ours] if groups == 3 else list(ours.chunk(3))
                grads = [grad] if groups == 3 else list(grad.chunk(3))
                outs = []
                for part, g in zip(parts, grads, strict=True):
                    out = normalize(part, weight, bias, statistics(part, running, groups), settings)
                    out.backward(g, retain_graph=True)
                    outs.append(out.detach())
                made.append([torch.cat(outs), ours.grad, weight.grad, bias.grad, *running])
            tolerance = 1e-3 if kind is torch.float16 else 1e-5
            for together, apart in zip(*made, strict=True):
                torch.testing.assert_close(together, apart, atol=tolerance, rtol=tolerance)
            assert int(made[0][-1]) == int(made[1][-1]) == 3


def compare_small_tiles(device: str) -> None:
    """Several tiles for each program, several programs for each channel."""
    from shoestring.kernels import batch_norm_tiles as kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "TILE", 128)
        patch.setattr(kernels, "SHARES", 4)
        patch.setattr(kernels, "readers", lambda: 3)
        patch.setattr(kernels, "programs", lambda: 9)
        compare_groups(device, small=True)


# -- Whole models ----------------------------------------------------------------------------------


class Inverted(nn.Module):
    """Wide inside; the last BatchNorm is read by an addition, the others by their ReLU alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 6, 1), nn.BatchNorm2d(6),
            nn.ReLU(inplace=True), nn.Conv2d(6, 2, 3, padding=1), nn.BatchNorm2d(2),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.body(x)
        return out


def model_of(device: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 2, 1), *(Inverted() for _ in range(2)))
    return model.to(device), torch.randn(4, 3, 5, 3, device=device)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch).square().mean()
    return out


def started(model: nn.Module, *techniques: Any) -> Step:
    step = apply(techniques, model, torch.optim.SGD(model.parameters(), lr=0.05), loss=loss)
    step.use_graph(False)
    return step


@contextmanager
def kernels_of(device: str) -> Iterator[Counter[str]]:
    """Kernels on this device too, and how often each function of theirs is called."""
    from shoestring.kernels import batch_norm_tiles as kernels

    ran: Counter[str] = Counter()
    plain = {name: getattr(kernels, name) for name in ("statistics", "normalize", "gradients")}

    def counted(name: str) -> Any:
        def call(*args: Any) -> Any:
            rectifies = name != "statistics" and args[-1] is True
            ran[name + (" relu" if rectifies else "")] += 1
            return plain[name](*args)

        return call

    batch_norm.DEVICES = ("cuda", device)
    for name in plain:
        setattr(kernels, name, counted(name))
    try:
        yield ran
    finally:
        batch_norm.DEVICES = ("cuda",)
        for name, function in plain.items():
            setattr(kernels, name, function)


AGAIN = {"cheap*2": 4, "lean*2": 4, "[lean]*2": 8, "no-bn": 4, "every-3": None}
"""BatchNorms made again with their ReLU; in a region twice, once in its second pass."""
SOME = ("lean*2", "[lean]*2", "every-3")


def compare_steps(device: str) -> None:
    """Two steps in FP32 on contiguous tensors against PyTorch's own."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        _compare_steps(device)


def _compare_steps(device: str) -> None:
    start, batch = model_of(device)
    plain = copy.deepcopy(start)
    step = started(plain)
    step(batch)
    expected = step(batch)
    for schedule in SOME if device == "cpu" else AGAIN:
        again = AGAIN[schedule]
        model = copy.deepcopy(start)
        technique = Checkpointing.parse(schedule)
        with kernels_of(device) as ran:
            step = started(model, technique)
            step(batch)
            assert ran["statistics"] == ran["gradients"] == 6 and not ran["gradients relu"]
            ran.clear()
            found = step(batch)
        assert ran["statistics"] == 6, "kept for the second pass"
        assert (ran["gradients"], ran["gradients relu"]) == (2, 4)
        assert again is None or ran["normalize relu"] == 4 + again
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        for (name, ours), theirs in zip(
            model.state_dict().items(), plain.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4, msg=name)


def compare_together(device: str) -> None:
    """With a precision they are there once, and simulated microbatches run as groups."""
    start, batch = model_of(device)
    for kind in ("bf16",) if device == "cpu" else ("bf16", "fp32"):
        model = copy.deepcopy(start)
        with kernels_of(device) as ran:
            step = started(
                model, Precision(kind), Checkpointing("no-bn"), Microbatching(2, simulated=True)
            )
            step(batch)
            ran.clear()
            step(batch)
        assert (ran["statistics"], ran["gradients"], ran["gradients relu"]) == (6, 2, 4)
        assert ran["normalize relu"] == 8
    with kernels_of(device):
        setup = started(copy.deepcopy(start), Precision("bf16"))._setup
        before = setup.run, list(setup.undo)
        batch_norm.lean_batch_norm(setup)
        assert (setup.run, setup.undo) == before


def compare_undone(device: str) -> None:
    """A plan that is revised leaves nothing behind, also where a block is a BatchNorm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4)).to(device)
    batch = torch.randn(8, 4, device=device)
    with kernels_of(device) as ran:
        blocks = ("1", "3")
        step = started(model, Checkpointing("per-block", blocks, ("cheap", "recompute")))
        for _ in range(2):
            step(batch)
        assert ran["gradients relu"] == 1
        for strategy, expected in (("residual-1", 1), ("none", 0)):
            chosen = Checkpointing(strategy, () if strategy == "none" else blocks)
            step.revise(type(step.plan).of([chosen]))
            ran.clear()
            for _ in range(2):
                step(batch)
            assert ran["gradients relu"] == expected
        assert not any("forward" in module.__dict__ for module in model.modules())


def compare_refusals(device: str) -> None:
    """What PyTorch refuses it still refuses, and FP64 stays its own."""
    with kernels_of(device) as ran:
        model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()).to(device)
        started(model, Checkpointing("no-bn"))
        for shape, message in [((4, 3, 5), "expected 4D"), ((4, 2, 5, 5), "running_mean")]:
            with pytest.raises((ValueError, RuntimeError), match=message):
                model(torch.randn(shape, device=device))
        with pytest.raises(ValueError, match="more than 1 value"):
            model(torch.randn(1, 3, 1, 1, device=device))
        model.double()(torch.randn(4, 3, 5, 5, device=device, dtype=torch.float64))
        assert not ran


KERNELS = ("compare", "compare_not_a_number", "compare_groups", "compare_small_tiles")
MODELS = ("compare_steps", "compare_together", "compare_undone", "compare_refusals")


@pytest.mark.slow
@pytest.mark.parametrize("names", [KERNELS, MODELS], ids=["kernels", "models"])
def test_in_the_interpreter(names: tuple[str, ...]) -> None:
    run_interpreted(__file__, *(f"{name}('cpu')" for name in names))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", KERNELS + MODELS)
def test_on_the_gpu(name: str) -> None:
    pytest.importorskip("triton")
    globals()[name]("cuda")


def test_on_the_cpu_modules_stay_as_they_are() -> None:
    model, _ = model_of("cpu")
    started(model, Checkpointing("no-bn"))
    assert not any("forward" in module.__dict__ for module in model.modules())
