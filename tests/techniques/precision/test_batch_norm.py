"""BatchNorm with its ReLU in one function: the kernels, and which modules are taken together."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from interpreter import run_interpreted

SHAPES = [(7, 5), (300, 16), (4, 32, 9, 7), (10, 16, 32, 32), (3, 130, 5, 5), (2, 200, 3, 4)]


def compare(device: str) -> None:
    """Outputs, running statistics and gradients against PyTorch's own in FP32."""
    from shoestring.techniques.precision.batch_norm import Settings, normalise, statistics

    torch.manual_seed(0)
    for shape in SHAPES:
        for rectify in (False, True):
            form = torch.channels_last if len(shape) == 4 else torch.contiguous_format
            channels = shape[1]
            plain = nn.BatchNorm2d(channels) if len(shape) == 4 else nn.BatchNorm1d(channels)
            plain = plain.to(device)
            with torch.no_grad():
                plain.weight.normal_(1, 0.3)
                plain.bias.normal_(0.2, 0.3)
            mean, var = plain.running_mean.clone(), plain.running_var.clone()
            counter = torch.zeros((), dtype=torch.int64, device=device)
            x = (3 + 2 * torch.randn(shape, device=device)).half().contiguous(memory_format=form)
            grad = torch.randn(shape, device=device).half().contiguous(memory_format=form)
            weight = plain.weight.detach().clone().requires_grad_()
            bias = plain.bias.detach().clone().requires_grad_()
            ours = x.clone().requires_grad_()
            batch = statistics(ours, (mean, var, counter))
            settings = Settings(0.1, plain.eps, rectify)
            out = normalise(ours, weight, bias, batch, settings)
            out.backward(grad)
            theirs = x.float().requires_grad_()
            expected = plain(theirs)
            (F.relu(expected) if rectify else expected).backward(
                torch.where(out.detach() > 0, grad, 0).float() if rectify else grad.float()
            )
            close = torch.testing.assert_close
            close(out.float(), F.relu(expected) if rectify else expected, atol=2e-3, rtol=2e-3)
            close(mean, plain.running_mean, atol=1e-6, rtol=1e-5)
            close(var, plain.running_var, atol=1e-6, rtol=1e-5)
            assert int(counter) == 1
            tolerance = {"atol": 5e-3, "rtol": 5e-3}
            close(ours.grad.float(), theirs.grad, **tolerance)
            close(weight.grad, plain.weight.grad, **tolerance)
            close(bias.grad, plain.bias.grad, **tolerance)
            again = normalise(x, weight, bias, batch.known(), settings)
            assert torch.equal(again, out) and int(counter) == 1, "a second pass, the same bits"


def compare_groups(device: str) -> None:
    """Three groups at once against one after the other."""
    from shoestring.techniques.precision.batch_norm import Settings, normalise, statistics

    torch.manual_seed(1)
    settings = Settings(0.1, 1e-5, True)
    for shape in ((6, 20, 5, 4), (12, 7), (9, 140, 3, 3)):
        form = torch.channels_last if len(shape) == 4 else torch.contiguous_format
        x = (1 + torch.randn(shape, device=device)).half().contiguous(memory_format=form)
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
                out = normalise(part, weight, bias, statistics(part, running, groups), settings)
                out.backward(g, retain_graph=True)
                outs.append(out.detach())
            made.append([torch.cat(outs), ours.grad, weight.grad, bias.grad, *running])
        for together, apart in zip(*made, strict=True):
            torch.testing.assert_close(together, apart, atol=1e-3, rtol=1e-3)
        assert int(made[0][-1]) == int(made[1][-1]) == 3


def test_in_the_interpreter() -> None:
    run_interpreted(__file__, "compare('cpu')", "compare_groups('cpu')")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu() -> None:
    compare("cuda")
    compare_groups("cuda")
