"""BatchNorm on CUDA in kernels of its own: keeps only its input, fuses the following ReLU.

The arithmetic is FP32, as the report asks for 16-bit tensors (Section 3.2). Statistics and
normalization are two functions, so that recomputation has the statistics already and runs one
kernel. Where a BatchNorm's output is read by one nn.ReLU and by nothing else, both are one
function: nothing of the size of the activations lies between them, forward or backward. Which those
are shows in the graph of the first forward pass.

Elsewhere (on the CPU, in FP64, in other layouts) BatchNorm stays PyTorch's, which means the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from ..kernels import batch_norm_tiles, has_triton, in_prediction
from ..kernels.batch_norm_tiles import Running, inner
from ..torch_private.fake_tensors import FakeTensor
from ..trace.fakes import is_fake
from .base import Setup

DEVICES = ("cuda",)
"""Where Triton's kernels run."""
_CLASSES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_TYPES = (torch.float16, torch.bfloat16, torch.float32)


class Statistics(NamedTuple):
    """Mean and 1 / sqrt(variance + eps) of every channel, once the sums are brought together."""

    found: torch.Tensor
    partial: torch.Tensor | None
    running: Running | None

    def known(self) -> Statistics:
        """The rest, after the first normalization."""
        return Statistics(self.found, None, None)


def statistics(x: torch.Tensor, running: Running, groups: int = 1) -> Statistics:
    """The statistics of each group of examples, which the normalization completes; no gradient."""
    if has_torch_function((x,)):
        return handle_torch_function(statistics, (x,), x, running, groups)
    return Statistics(*batch_norm_tiles.statistics(x.detach(), groups), running)


statistics.kept_for_second_pass = Statistics.known  # type: ignore[attr-defined]


class NormSettings(NamedTuple):
    """Numbers of a BatchNorm, and whether its ReLU comes along."""

    momentum: float
    eps: float
    rectify: bool


def normalize(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    batch: Statistics,
    settings: NormSettings,
) -> torch.Tensor:
    """The normalized input, or its positive part; the gradient goes through the statistics too."""
    if has_torch_function((x,)):
        return handle_torch_function(normalize, (x,), x, weight, bias, batch, settings)
    return _Normalize.apply(x, weight, bias, batch, settings)


def _again(args: tuple[Any, ...]) -> tuple[Any, ...]:
    x, weight, bias, batch, settings = args
    return x, weight, bias, batch.known(), settings


normalize.cheap_to_recompute = _again  # type: ignore[attr-defined]


class _Normalize(torch.autograd.Function):
    """y = (x - mean) rstd w + b; its gradient reads x and the statistics, not y."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        batch: Statistics,
        settings: NormSettings,
    ) -> torch.Tensor:
        """One pass over x."""
        ctx.save_for_backward(x, weight, bias, batch.found)
        ctx.rectify = settings.rectify
        return batch_norm_tiles.normalize(x, *batch, weight, bias, *settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """dx = w rstd (g - mean(g) - unit mean(g unit)), dw = sum(g unit), db = sum(g)."""
        x, weight, bias, found = ctx.saved_tensors
        if grad.stride() != x.stride():
            grad = torch.empty_like(x).copy_(grad)
        made, sums = batch_norm_tiles.gradients(x, grad, found, weight, bias, ctx.rectify)
        along, level = sums[0] if len(sums) == 1 else sums.sum(0)
        return made, along.to(weight.dtype), level.to(bias.dtype), None, None


class _Fusion:
    """The BatchNorms of a model, and which of them take their ReLU along."""

    def __init__(self, model: nn.Module) -> None:
        own = [m for m in model.modules() if not _changed(m)]
        self._norms = [m for m in own if type(m) in _CLASSES and _fits(m)]
        self._relus = [m for m in own if type(m) is nn.ReLU]
        self._fused: set[nn.Module] = set()
        self._found: set[nn.Module] | None = None
        self._nodes: list[tuple[nn.Module, Any]] = []
        self._rectified: list[Any] = []
        self._watching = False
        self._open = 0

    def __bool__(self) -> bool:
        return bool(self._norms)

    def install(self) -> Callable[[], None]:
        """Put the functions into the modules; returns how to take them out."""
        for norm in self._norms:
            forward: Any = partial(self._normalized, norm, norm.forward)
            forward.in_groups = partial(self._in_groups, norm)
            norm.forward = forward
        for relu in self._relus:
            relu.forward = partial(self._positive, relu.forward)  # type: ignore[method-assign]

        def undo() -> None:
            for module in (*self._norms, *self._relus):
                del module.forward  # the class's own shows again

        return undo

    def run(self, plain: Callable[[Any], torch.Tensor], batch: Any) -> torch.Tensor:
        """A forward pass: the first is looked at, those after it run what was found.

        Not before the next forward pass: the backward pass in between may run this one again.
        """
        if self._found is not None:
            self._fused = self._found
        self._watching = self._found is None
        self._open = 0
        try:
            loss = plain(batch)
            if self._watching and isinstance(loss, torch.Tensor):
                self._found = self._pairs(loss)
        finally:
            self._watching = False
            self._nodes.clear()
            self._rectified.clear()
        if self._open:
            raise RuntimeError(
                "a BatchNorm's output went to a ReLU in the first step and elsewhere in this one; "
                "write F.relu for nn.ReLU in a model that changes so"
            )
        return loss

    def _normalized(self, norm: Any, plain: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        made = self._in_groups(norm, x, 1)
        return plain(x) if made is None else made

    def _in_groups(self, norm: Any, x: torch.Tensor, groups: int) -> torch.Tensor | None:
        """The batch as groups one after the other, each with its statistics; None where it cannot.

        PyTorch itself refuses one value a channel, or a shape that does not fit.
        """
        if not (norm.training and type(x) in (torch.Tensor, FakeTensor) and _is_there(x)):
            return None
        if x.dtype not in _TYPES or inner(x) is None:
            return None
        if x.shape[1] != norm.num_features or x.numel() <= groups * x.shape[1]:
            return None
        norm._check_input_dim(x)
        fused = norm in self._fused
        running = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
        settings = NormSettings(norm.momentum, norm.eps, fused)
        out = normalize(x, norm.weight, norm.bias, statistics(x, running, groups), settings)
        if fused:
            out._is_rectified = True  # type: ignore[attr-defined]
            self._open += 1
        elif self._watching:
            self._nodes.append((norm, out.grad_fn))
        return out

    def _positive(self, plain: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        if getattr(x, "_is_rectified", False):
            self._open -= 1
            return x
        if self._watching:
            self._rectified.append(x.grad_fn)
        return plain(x)

    def _pairs(self, loss: torch.Tensor) -> set[nn.Module]:
        """BatchNorms all of whose outputs have one reader, an nn.ReLU."""
        readers: dict[Any, int] = {}
        seen, todo = set(), [loss.grad_fn]
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            for after, _ in node.next_functions:
                readers[after] = readers.get(after, 0) + 1
                todo.append(after)
        alone = {n for n, node in self._nodes if readers.get(node) == 1 and node in self._rectified}
        return alone - {n for n, node in self._nodes if readers.get(node) != 1}


def _changed(module: nn.Module) -> bool:
    """Whether it has hooks, or a forward that is not its class's."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    return bool(hooks) or "forward" in module.__dict__


def _is_there(x: torch.Tensor) -> bool:
    """Whether it lies where the kernels run, or stands for one that does."""
    if is_fake(x):
        return in_prediction(x)
    return x.device.type in DEVICES and has_triton()


def _fits(norm: Any) -> bool:
    return norm.affine and norm.track_running_stats and norm.momentum is not None


def lean_batch_norm(setup: Setup) -> None:
    """Install it where it can run, a CUDA model with BatchNorm and Triton; a second time is none.

    The run it wraps is the first that looks at the graph: what defers functions goes around it.
    """
    if not _is_there(next(setup.model.parameters())):
        return
    fusion, plain = _Fusion(setup.model), setup.run
    if not fusion:
        return
    setup.undo.append(fusion.install())
    setup.run = lambda batch: fusion.run(plain, batch)
    setup.first_run_differs = True
