"""Kernels of others, such as Liger's: traced without a GPU, and never asked for what they write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring.errors import TraceError

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402


@triton.jit
def _doubled(x, out, n, size: tl.constexpr):  # type: ignore[no-untyped-def] # pragma: no cover
    at = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


class _Doubled(torch.autograd.Function):
    asks = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(x.shape)
        _doubled[(4,)](x, out, x.numel(), size=1024)
        if _Doubled.asks:
            float(out.sum())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if torch.equal(gradient, torch.tensor(1.0)):  # as Liger does, of a loss it has scaled
            return gradient
        return 2 * gradient


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    words, labels = batch
    counted = (labels != -100).sum().item()
    return _Doubled.apply(model(words).square().sum() / counted)


def _profiled() -> int:
    batch = torch.randn(8, 16), torch.zeros(8, dtype=torch.int64)
    model = nn.Linear(16, 32)
    found = ss.profile(model, batch, loss=_loss, optimizer="sgd-plain", accounting="device")
    return found.peak_bytes


def test_a_kernel_is_not_launched_on_fake_tensors() -> None:
    """Inputs 576 bytes, weights and gradients 2 × 2,176, activations of 8 × 32 FP32 numbers."""
    assert 576 + 2 * 2176 <= _profiled() < 576 + 2 * 2176 + 4 * 1024 + 512


def test_what_a_kernel_would_have_written_is_not_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Doubled, "asks", True)
    with pytest.raises((TraceError, RuntimeError, ValueError)):  # then it is run, without a GPU
        _profiled()
