"""Launches the kernels of an update with moments in few bits; import it where there is Triton."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from ...kernels.codes import BLOCK, blocks_of
from ...kernels.quantized_update import ROWS, WARPS, quantized_adam_kernel, quantized_sgd_kernel
from ...kernels.rounding import DROPPED_BITS
from ..base import LossScaling


def launch(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    moments: list[torch.Tensor],
    scales: list[torch.Tensor],
    state: dict[str, Any],
    group: dict[str, Any],
    rate: torch.Tensor,
    counter: torch.Tensor,
    draw: int,
    scaling: LossScaling | None,
    bits: int,
) -> None:
    """One update of one tensor, where it lies."""
    elements, block, rows = parameter.numel(), BLOCK.get(bits, 256), ROWS[bits]
    factors = (rate, rate) if scaling is None else (scaling.scale, scaling.found_inf)
    blocks = blocks_of(elements, bits) if bits in BLOCK else 0
    modes: dict[str, Any] = {
        "BITS": bits, "UNSCALE": scaling is not None, "MAXIMIZE": bool(group["maximize"]),
        "DROPPED": DROPPED_BITS.get(parameter.dtype, 0), "ROWS": rows, "BLOCK": block,
        "num_warps": WARPS,
    }  # fmt: skip
    grid = (triton.cdiv(elements, rows * block),)
    decay = group["weight_decay"]
    if "betas" not in group:
        held, scale = (moments[0], scales[0]) if moments else (parameter, parameter)
        quantized_sgd_kernel[grid](
            parameter, gradient, held, scale, rate, *factors, counter, elements, blocks, draw,
            group["momentum"], decay, MOMENTUM=bool(moments), NESTEROV=group["nesterov"], **modes,
        )  # fmt: skip
        return
    first, second = map(float, group["betas"])
    quantized_adam_kernel[grid](
        parameter, gradient, *moments, *scales, state["step"], rate, *factors, counter, elements,
        blocks, draw, first, 1 - first, second, 1 - second, _log(first), _log(second),
        decay, group["eps"], COUPLED=not group.get("decoupled_weight_decay", False), **modes,
    )  # fmt: skip


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf
