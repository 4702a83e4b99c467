"""Functions by what running them again takes: PyTorch's names for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

CHEAP: frozenset[Any] = frozenset(
    {
        F.batch_norm, F.layer_norm, F.group_norm, F.instance_norm, F.relu, F.relu6, F.leaky_relu,
        F.rms_norm, F.gelu, F.silu, F.elu, F.glu, F.hardtanh, F.hardswish, F.mish, F.softplus,
        F.sigmoid, F.tanh, torch.relu, torch.sigmoid, torch.tanh, torch.Tensor.relu,
        torch.Tensor.sigmoid, torch.Tensor.tanh,
    }
)  # fmt: skip
"""Normalizations and activation functions: what `no-bn` recomputes."""


def _named(*names: str) -> frozenset[Any]:
    """The functions of these names, as torch and as tensors have them."""
    places = torch, torch.Tensor
    return frozenset(getattr(at, name) for name in names for at in places if hasattr(at, name))


PRODUCTS = _named("mul", "multiply", "div", "divide", "__mul__", "__rmul__", "__truediv__")
"""Their gradient reads both factors, so a product can be recomputed from what is there anyway."""

ELEMENTWISE = PRODUCTS | _named(
    "add", "sub", "neg", "pow", "square", "exp", "sqrt", "rsqrt", "reciprocal", "erf", "to",
    "float", "half", "bfloat16", "__add__", "__radd__", "__sub__", "__rsub__", "__neg__", "__pow__",
    "__rtruediv__",
)  # fmt: skip
"""Functions that handwritten activations and normalizations use."""

SAVES_OUTPUT = frozenset({F.relu, F.sigmoid, F.tanh}) | _named(
    "relu", "sigmoid", "tanh", "exp", "sqrt", "rsqrt", "reciprocal"
)
"""Those whose own gradient reads the output, so that autograd saves it while they run."""

_MORE: set[Any] = {
    F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, torch.conv1d,
    torch.conv2d, torch.conv3d, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__,
    torch.bmm,
}  # fmt: skip
NODES = CHEAP | _MORE
"""Functions that `every-M` counts: their gradient reads their input."""

WIDENING = frozenset(_MORE | {torch.addmm})

JOINTS: frozenset[Any] = frozenset(
    {torch.add, torch.Tensor.add, torch.Tensor.__add__, F.pad, F.avg_pool2d, F.adaptive_avg_pool2d}
)
"""Functions that `every-M` recomputes on the way without counting them."""
