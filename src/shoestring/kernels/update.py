"""SGD, Adam and AdamW on 16-bit tensors in Triton: each piece where it lies, computed in FP32.

A scaled moment's exponent follows from its largest new element, so Adam's new moments are computed
twice: once for that, once to be stored. No FP32 copy is made. Random bits are the ones that the
blocks' copies would be rounded with, so both ways compute the same but for the last bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..techniques.precision.blocks import Block, Piece
from ..techniques.precision.moments import SUFFIX, exponents_for
from ..techniques.precision.rounding import DROPPED_BITS, FIRST, SECOND, STRIDE, Noise
from ..techniques.precision.scaling import LossScale

KEYS = ("exp_avg", "exp_avg_sq")
BLOCK = 1024
ROW = 4
"""Numbers between the rows of a table, of which two are used: a row starts at 16 bytes."""
_ANYWHERE = ["first_exponent", "second_exponent"]
_STRIDE, _FIRST, _SECOND = tl.constexpr(STRIDE), tl.constexpr(FIRST), tl.constexpr(SECOND)


@triton.jit
def _power_of_two(exponent):  # type: ignore[no-untyped-def]
    return ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _moved(  # type: ignore[no-untyped-def]
    parameter, gradient, first, second, first_exponent, second_exponent, scale, place, there,
    keep_first, add_first, keep_second, add_second, decay,
    SCALED: tl.constexpr, UNSCALE: tl.constexpr, COUPLED: tl.constexpr,
):  # fmt: skip
    """The parameter, and the moments after this gradient."""
    p = tl.load(parameter + place, mask=there, other=0.0).to(tl.float32)
    g = tl.load(gradient + place, mask=there, other=0.0).to(tl.float32)
    m = tl.load(first + place, mask=there, other=0.0).to(tl.float32)
    v = tl.load(second + place, mask=there, other=0.0).to(tl.float32)
    if UNSCALE:
        g *= 1.0 / tl.load(scale)
    if COUPLED:
        g += decay * p
    if SCALED:
        m *= _power_of_two(-tl.load(first_exponent))
        v *= _power_of_two(-tl.load(second_exponent))
        v *= v
    return p, keep_first * m + add_first * g, keep_second * v + add_second * (g * g)


@triton.jit(do_not_specialize=_ANYWHERE)
def _tops_kernel(  # type: ignore[no-untyped-def]
    parameter, gradient, first, second, first_exponent, second_exponent, scale, tops, elements,
    keep_first, add_first, keep_second, add_second, decay,
    UNSCALE: tl.constexpr, COUPLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest elements of the new moments, as they are stored."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = place < elements
    _, m, v = _moved(
        parameter, gradient, first, second, first_exponent, second_exponent, scale, place, there,
        keep_first, add_first, keep_second, add_second, decay, True, UNSCALE, COUPLED,
    )  # fmt: skip
    tl.atomic_max(tops, tl.max(tl.where(there, tl.abs(m), 0.0), axis=0))
    tl.atomic_max(tops + 1, tl.sqrt(tl.max(tl.where(there, v, 0.0), axis=0)))


@triton.jit
def _rounded(value, counter, draw, place, BITS: tl.constexpr, KEEP_NAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `Noise.rounded`."""
    x = place + (counter + _STRIDE * draw)
    x = (x ^ (x >> 16)) * _FIRST
    x = (x ^ (x >> 15)) * _SECOND
    x = (x ^ (x >> 16)) & ((1 << BITS) - 1)
    made = ((x + value.to(tl.int32, bitcast=True)) & -(1 << BITS)).to(tl.float32, bitcast=True)
    if KEEP_NAN:
        made = tl.where(tl.abs(value) < float("inf"), made, value)
    return made


@triton.jit(
    do_not_specialize=["first_exponent", "second_exponent", "corrections", "draw", "offset"]
)
def _update_kernel(  # type: ignore[no-untyped-def]
    parameter, gradient, first, second, first_exponent, second_exponent, exponents, corrections,
    rate, scale, found_inf, counter, elements, draw, offset,
    keep_first, add_first, keep_second, add_second, decay, eps,
    SCALED: tl.constexpr, UNSCALE: tl.constexpr, COUPLED: tl.constexpr, BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr, SWAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = place < elements
    p, m, v = _moved(
        parameter, gradient, first, second, first_exponent, second_exponent, scale, place, there,
        keep_first, add_first, keep_second, add_second, decay, SCALED, UNSCALE, COUPLED,
    )  # fmt: skip
    if UNSCALE:
        there = there & (tl.load(found_inf + 0 * place) == 0.0)
    lr = tl.load(rate).to(tl.float32)
    root = tl.sqrt(v)
    if not COUPLED:
        p -= lr * decay * p
    p -= lr / tl.load(corrections) * m / (root / tl.load(corrections + 1) + eps)
    if SCALED:
        m *= _power_of_two(tl.load(exponents))
        v = root * _power_of_two(tl.load(exponents + 1))
    if BITS:
        at, drawn = tl.load(counter), place + offset
        if STOCHASTIC:
            p = _rounded(p, at, draw + 1, drawn, BITS, not UNSCALE)
        mine = draw + STOCHASTIC + 1
        m = _rounded(m, at, mine + SWAPPED, drawn, BITS, not UNSCALE)
        v = _rounded(v, at, mine + 1 - SWAPPED, drawn, BITS, not UNSCALE)
    tl.store(parameter + place, p.to(parameter.dtype.element_ty), mask=there)
    tl.store(first + place, m.to(first.dtype.element_ty), mask=there)
    tl.store(second + place, v.to(second.dtype.element_ty), mask=there)


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


@triton.jit(do_not_specialize=["draw", "offset"])
def _sgd_kernel(  # type: ignore[no-untyped-def]
    parameter, gradient, buffer, rate, scale, found_inf, counter, elements, draw, offset,
    momentum, decay,
    UNSCALE: tl.constexpr, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = place < elements
    p = tl.load(parameter + place, mask=there, other=0.0).to(tl.float32)
    g = tl.load(gradient + place, mask=there, other=0.0).to(tl.float32)
    if UNSCALE:
        g *= 1.0 / tl.load(scale)
        there = there & (tl.load(found_inf + 0 * place) == 0.0)
    g += decay * p
    at, drawn = tl.load(counter), place + offset
    if MOMENTUM:
        m = momentum * tl.load(buffer + place, mask=there, other=0.0).to(tl.float32) + g
        g = g + momentum * m if NESTEROV else m
        if BITS:
            m = _rounded(m, at, draw + 2, drawn, BITS, not UNSCALE)
        tl.store(buffer + place, m.to(buffer.dtype.element_ty), mask=there)
    p -= tl.load(rate).to(tl.float32) * g
    if BITS:
        p = _rounded(p, at, draw + 1, drawn, BITS, not UNSCALE)
    tl.store(parameter + place, p.to(parameter.dtype.element_ty), mask=there)


def sgd(
    states: Any, blocks: list[Block], noise: Noise, scale: LossScale | None, *, stochastic: bool
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
            _sgd_kernel[(triton.cdiv(elements, BLOCK),)](
                narrow, piece.gradient, kept, rates[id(group)], *factors, noise.counter, elements,
                draws, offset, momentum, group["weight_decay"],
                UNSCALE=scale is not None, MOMENTUM=bool(momentum), NESTEROV=group["nesterov"],
                BITS=bits, BLOCK=BLOCK,
            )  # fmt: skip
            offset += elements
        draws += (1 + bool(momentum)) * bool(bits)
    noise.move(draws)


def adam(
    states: Any, blocks: list[Block], noise: Noise, scale: LossScale | None, *, stochastic: bool
) -> None:
    """One update of all blocks, and of their counters."""
    tasks, draws = _tasks(states, blocks, stochastic, unscale=scale is not None)
    device = noise.counter.device
    tops = torch.zeros(len(tasks), ROW, dtype=torch.float32, device=device)
    factor, found_inf = (tops, tops) if scale is None else (scale.scale, scale.found_inf)
    for task, top in zip(tasks, tops.unbind(), strict=True):
        if task.scaled:
            _tops_kernel[task.grid](
                *task.tensors, factor, top, task.elements, *task.numbers, **task.modes
            )
    exponents = exponents_for(tops)
    corrections = _corrections(states, blocks)
    rates = {id(block.group): _on_device(block.group["lr"], device) for block in blocks}
    for task, chosen in zip(tasks, exponents.unbind(), strict=True):
        _update_kernel[task.grid](
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
    torch._foreach_add_(steps, [moved] * len(steps))


def _tasks(
    states: Any, blocks: list[Block], stochastic: bool, *, unscale: bool
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


def _corrections(states: Any, blocks: list[Block]) -> dict[torch.Tensor, torch.Tensor]:
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
    torch._foreach_copy_(slots, chosen.unbind())


def _on_device(rate: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(rate, torch.Tensor):
        return rate
    return torch.full((), rate, dtype=torch.float32, device=device)
