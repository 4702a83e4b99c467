"""The forward pass of a wide residual network from its state dict alone, without modules."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def batch_norm(x: Tensor, state: Mapping[str, Tensor], name: str, training: bool) -> Tensor:
    """Normalize each channel, by the batch's own statistics or by the running ones."""
    if training:
        mean = x.mean(dim=(0, 2, 3))
        variance = ((x - mean[:, None, None]) ** 2).mean(dim=(0, 2, 3))
    else:
        mean, variance = state[f"{name}.running_mean"], state[f"{name}.running_var"]
    scale = state[f"{name}.weight"] / torch.sqrt(variance + 1e-5)
    return (x - mean[:, None, None]) * scale[:, None, None] + state[f"{name}.bias"][:, None, None]


def convolution(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """A padded 3x3 convolution as nine shifted matrix products."""
    height, width = x.shape[2:]
    padded = torch.zeros(*x.shape[:2], height + 2, width + 2, dtype=x.dtype)
    padded[:, :, 1:-1, 1:-1] = x
    total = torch.zeros(x.shape[0], weight.shape[0], height, width, dtype=x.dtype)
    for row in range(3):
        for column in range(3):
            window = padded[:, :, row : row + height, column : column + width]
            total = total + torch.einsum("oc,nchw->nohw", weight[:, :, row, column], window)
    return total[:, :, ::stride, ::stride]


def shortcut(x: Tensor, channels: int, stride: int, kind: str) -> Tensor:
    """The input subsampled, in the first channels of an output that is zero elsewhere."""
    if stride == 2 and kind == "pool":
        x = (x[..., ::2, ::2] + x[..., 1::2, ::2] + x[..., ::2, 1::2] + x[..., 1::2, 1::2]) / 4
    elif stride == 2:
        x = x[..., ::2, ::2]
    y = torch.zeros(x.shape[0], channels, *x.shape[2:], dtype=x.dtype)
    shared = min(channels, x.shape[1])
    y[:, :shared] = x[:, :shared]
    return y


def wide_resnet(
    images: Tensor,
    state: Mapping[str, Tensor],
    depth: int,
    training: bool = False,
    kind: str = "strided",
) -> Tensor:
    """Class scores of images with even sides."""
    x = convolution(images, state["conv.weight"], 1)
    for group in (1, 2, 3):
        for block in range((depth - 4) // 6):
            name = f"group{group}.{block}"
            stride = 2 if group > 1 and block == 0 else 1
            y = F.relu(batch_norm(x, state, f"{name}.bn1", training))
            y = convolution(y, state[f"{name}.conv1.weight"], stride)
            y = F.relu(batch_norm(y, state, f"{name}.bn2", training))
            y = convolution(y, state[f"{name}.conv2.weight"], 1)
            x = shortcut(x, y.shape[1], stride, kind) + y
    x = F.relu(batch_norm(x, state, "bn", training)).mean(dim=(2, 3))
    return x @ state["linear.weight"].T + state["linear.bias"]
