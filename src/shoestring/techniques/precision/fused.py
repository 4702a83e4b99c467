"""Launches the update kernels: SGD, Adam and AdamW on each piece where it lies, with no FP32 copy.

A scaled moment's exponent follows from its largest new element, so Adam's new moments are computed
twice: once for that, once to be stored. Import it where there is Triton.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from ...kernels.rounding import DROPPED_BITS, Noise
from ...kernels.update import BLOCK, sgd_kernel, tops_kernel, update_kernel
from ...torch_private.kernels import foreach_add_, foreach_copy_
from .blocks import Piece, UpdateBlock
from .moments import SUFFIX, exponents_for
from .scaling import LossScale

KEYS = ("exp_avg", "exp_avg_sq")
ROW = 4
"""Numbers between the rows of a table, of which two are used: a row starts at 16 bytes."""


class _Task(NamedTuple):
    """One piece, as Adam's kernels take it."""

    piece: Piece
    tensors: tuple[torch.Tensor, ...]
    """Parameter, gradient, moments, their exponents (or anything where there are none)."""
    numbers: tuple[float, ...]
    group: dict[str, Any]
    modes: dict[str, Any]
    scaled: bool
    swapped: int
    draw: int
    offset: int

    @property
    def elements(self) -> int:
        return self.tensors[0].numel()

    @property
    def grid(self) -> tuple[int]:
        return (triton.cdiv(self.elements, BLOCK),)


def sgd(
    states: Any,
    blocks: list[UpdateBlock],
    noise: Noise,
    scale: LossScale | None,
    *,
    stochastic: bool,
) -> None:
    """One update of all blocks."""
    device, draws = noise.counter.device, 0
    rates = {id(block.group): _on_device(block.group["lr"], device) for block in blocks}
    for block in blocks:
        group, offset = block.group, 0
        momentum, dtype = group["momentum"], block.pieces[0].parameter.dtype
        bits = DROPPED_BITS.get(dtype, 0) if stochastic else 0
        for piece in block.pieces:
            narrow, elements = piece.narrow, piece.narrow.numel()
            kept = states[piece.parameter]["momentum_buffer"][piece.rows] if momentum else narrow
            factors = (narrow, narrow) if scale is None else (scale.scale, scale.found_inf)
            sgd_kernel[(triton.cdiv(elements, BLOCK),)](
                narrow, piece.gradient, kept, rates[id(group)], *factors, noise.counter, elements,
                draws, offset, momentum, group["weight_decay"],
                UNSCALE=scale is not None, MOMENTUM=bool(momentum), NESTEROV=group["nesterov"],
                BITS=bits, BLOCK=BLOCK,
            )  # fmt: skip
            offset += elements
        draws += (1 + bool(momentum)) * bool(bits)
    noise.move(draws)


def adam(
    states: Any,
    blocks: list[UpdateBlock],
    noise: Noise,
    scale: LossScale | None,
    *,
    stochastic: bool,
) -> None:
    """One update of all blocks, and of their counters."""
    tasks, draws = _tasks(states, blocks, stochastic, unscale=scale is not None)
    device = noise.counter.device
    tops = torch.zeros(len(tasks), ROW, dtype=torch.float32, device=device)
    factor, found_inf = (tops, tops) if scale is None else (scale.scale, scale.found_inf)
    for task, top in zip(tasks, tops.unbind(), strict=True):
        if task.scaled:
            tops_kernel[task.grid](
                *task.tensors, factor, top, task.elements, *task.numbers, **task.modes
            )
    exponents = exponents_for(tops)
    corrections = _corrections(states, blocks)
    rates = {id(block.group): _on_device(block.group["lr"], device) for block in blocks}
    for task, chosen in zip(tasks, exponents.unbind(), strict=True):
        update_kernel[task.grid](
            *task.tensors, chosen, corrections[task.piece.parameter], rates[id(task.group)],
            factor, found_inf, noise.counter, task.elements, task.draw, task.offset,
            *task.numbers, task.group["eps"], SCALED=task.scaled,
            BITS=DROPPED_BITS.get(task.piece.parameter.dtype, 0), STOCHASTIC=int(stochastic),
            SWAPPED=task.swapped, **task.modes,
        )  # fmt: skip
    noise.move(draws)
    _keep_exponents(tasks, exponents, scale)
    steps = [states[parameter]["step"] for parameter in corrections]
    # As a list: of one tensor the function would read the value.
    moved = torch.ones_like(steps[0]) if scale is None else 1 - scale.found_inf
    foreach_add_(steps, [moved] * len(steps))


def _tasks(
    states: Any, blocks: list[UpdateBlock], stochastic: bool, *, unscale: bool
) -> tuple[list[_Task], int]:
    """In order, and how often they draw: a block as often as its copies would."""
    tasks, draws = [], 0
    for block in blocks:
        offset, group = 0, block.group
        first, second = group["betas"]
        numbers = first, 1 - first, second, 1 - second, group["weight_decay"]
        coupled = not group.get("decoupled_weight_decay", False)
        modes = {"UNSCALE": unscale, "COUPLED": coupled, "BLOCK": BLOCK}
        for piece in block.pieces:
            state = states[piece.parameter]
            scaled = KEYS[0] + SUFFIX in state
            moments = [state[key][piece.rows] for key in KEYS]
            slots = [state[key + SUFFIX][piece.index] for key in KEYS] if scaled else moments
            tensors = (piece.narrow, piece.gradient, *moments, *slots)
            swapped = block.keys.index(KEYS[0])
            tasks.append(
                _Task(piece, tensors, numbers, group, modes, scaled, swapped, draws, offset)
            )
            offset += piece.narrow.numel()
        if block.pieces[0].parameter.dtype in DROPPED_BITS:
            draws += len(KEYS) + stochastic
    return tasks, draws


def _corrections(states: Any, blocks: list[UpdateBlock]) -> dict[torch.Tensor, torch.Tensor]:
    """Of each parameter, what the averages lack because they began at zero."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    groups = {id(block.group): block.group for block in blocks}
    for name, group in groups.items():
        parameters = list(
            dict.fromkeys(
                piece.parameter for b in blocks if id(b.group) == name for piece in b.pieces
            )
        )
        steps = torch.stack([states[parameter]["step"] for parameter in parameters]).double() + 1
        first, second = group["betas"]
        both = torch.stack([1 - first**steps, (1 - second**steps).sqrt()], dim=1)
        made.update(zip(parameters, both.float().unbind(), strict=True))
    return made


def _keep_exponents(tasks: list[_Task], exponents: torch.Tensor, scale: LossScale | None) -> None:
    """Where the kernels read the old ones until now."""
    slots = [slot for task in tasks if task.scaled for slot in task.tensors[4:]]
    if not slots:
        return
    rows = [row for row, task in enumerate(tasks) if task.scaled]
    used = exponents if len(rows) == len(tasks) else torch.stack([exponents[r] for r in rows])
    chosen = used[:, : len(KEYS)].flatten().to(slots[0].dtype)
    if scale is not None:
        chosen = torch.where(scale.found_inf > 0, torch.stack(slots), chosen)
    foreach_copy_(slots, chosen.unbind())


def _on_device(rate: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(rate, torch.Tensor):
        return rate
    return torch.full((), rate, dtype=torch.float32, device=device)
