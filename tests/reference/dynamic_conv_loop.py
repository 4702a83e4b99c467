"""Dynamic convolution and the DC-Transformer's convolution block, one number at a time."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def dynamic_conv(x: Tensor, weights: Tensor, left: int) -> Tensor:
    """y[b, t, c] = sum_k w[b, t, head of c, k] x[b, t + k - left, c], zeros outside."""
    batch, time, channels = x.shape
    heads, taps = weights.shape[2:]
    y = torch.zeros_like(x)
    for b in range(batch):
        for t in range(time):
            for c in range(channels):
                head = c // (channels // heads)
                for k in range(taps):
                    source = t + k - left
                    if 0 <= source < time:
                        y[b, t, c] += weights[b, t, head, k] * x[b, source, c]
    return y


def convolution_block(
    x: Tensor, state: Mapping[str, Tensor], heads: int, causal: bool, lengths: list[int]
) -> Tensor:
    """Linear, dynamic convolution and linear in evaluation mode, from the block's state dict."""
    batch, time = x.shape[:2]
    taps = state["kernel.weight"].shape[0] // heads
    inner = torch.zeros_like(x)
    weights = x.new_zeros(batch, time, heads, taps)
    for b in range(batch):
        for t in range(lengths[b]):
            inner[b, t] = state["linear1.weight"] @ x[b, t] + state["linear1.bias"]
        for t in range(time):
            scores = state["kernel.weight"] @ inner[b, t]
            for h in range(heads):
                raised = [math.exp(scores[h * taps + k]) for k in range(taps)]
                for k in range(taps):
                    weights[b, t, h, k] = raised[k] / sum(raised)
    mixed = dynamic_conv(inner, weights, taps - 1 if causal else taps // 2)
    y = torch.zeros_like(x)
    for b in range(batch):
        for t in range(time):
            y[b, t] = state["linear2.weight"] @ mixed[b, t] + state["linear2.bias"]
    return y
