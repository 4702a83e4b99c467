"""One update with moments in few bits: SGD, Adam and AdamW.

On CUDA one kernel a tensor does all of it in place (`kernels.quantized_update`). Elsewhere the same
in PyTorch, in FP32 on a piece of a tensor at a time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim import SGD, Optimizer

from ...errors import InputError
from ...kernels import expected, has_triton, launched
from ...kernels.codes import BLOCK, SHIFTS, blocks_of, decode, encode, noise_of, random_bits
from ...kernels.rounding import DROPPED_BITS, Noise
from ...torch_private.kernels import foreach_add_
from ...trace.cuda import is_dense, lies_as, on_cuda
from ...trace.fakes import is_fake
from ..base import LossScaling, Run
from .storage import SCALE, SIGNED, MomentCodes, dense_like, flat_of

_LEAST, _MOST = 2**10, 2**18

Work = list[tuple[int, dict[str, Any], torch.Tensor]]
"""Number of a parameter among all, its group, itself."""


class QuantizedUpdate:
    """Gradients → parameters, in place of `optimizer.step`."""

    def __init__(
        self, optimizer: Optimizer, codes: MomentCodes, scale: LossScaling | None, noise: Noise
    ) -> None:
        self._optimizer, self._codes, self._scale, self._noise = optimizer, codes, scale, noise
        self._early: set[torch.Tensor] | None = None
        """Parameters whose state was made before the first pass; None before that."""
        held = (p for group in optimizer.param_groups for p in group["params"])
        self._elements = piece_elements(sum(p.numel() for p in held))

    @torch.no_grad()
    def __call__(self) -> None:
        """One update; skipped on the device, without waiting for it, if a gradient overflowed."""
        optimizer, scale = self._optimizer, self._scale
        for before in optimizer._optimizer_step_pre_hooks.values():
            before(optimizer, (), {})
        work = self._work()
        self._drop_early()
        if scale is not None:
            scale.look_for_overflow([p.grad for _, _, p in work if p.grad is not None])
        self.update(work)
        self._noise.move(sum(len(group["params"]) for group in optimizer.param_groups))
        if scale is not None:
            scale.adjust()
        optimizer._opt_called = True  # type: ignore[attr-defined] # asked by LR schedulers
        for after in optimizer._optimizer_step_post_hooks.values():
            after(optimizer, (), {})

    def beginning(self, run: Run) -> Run:
        """The run; on CUDA the first one makes all state, before activations are there.

        Made by the first update it would lie in the gaps that they left, and keep them apart.
        """

        def after_state(batch: Any) -> torch.Tensor:
            if self._early is None:
                self._early = set()
                for group in self._optimizer.param_groups:
                    for parameter in group["params"]:
                        real = parameter.is_cuda and not is_fake(parameter)
                        if real and parameter.requires_grad and not self._state(parameter):
                            self._begin(group, parameter)
                            self._early.add(parameter)
            return run(batch)

        return after_state

    def _drop_early(self) -> None:
        """One that got no gradient has no state in plain training."""
        held = (p for group in self._optimizer.param_groups for p in group["params"])
        for parameter in held if self._early else ():
            if parameter in (self._early or ()) and parameter.grad is None:
                del self._optimizer.state[parameter]
        self._early = set()

    def _work(self) -> Work:
        held = ((group, p) for group in self._optimizer.param_groups for p in group["params"])
        return [
            (number, group, parameter)
            for number, (group, parameter) in enumerate(held)
            if parameter.grad is not None and parameter.numel()
        ]

    def update(self, work: Work) -> None:
        """Some parameters, whose gradients are there; the noise stays where it is."""
        rates: dict[int, Any] = {}
        for number, group, parameter in work:
            if parameter.grad is None or parameter.grad.layout is not torch.strided:
                raise InputError(
                    "a sparse gradient has no update with moments in few bits",
                    hint="build the embedding with sparse=False",
                )
            self._begin(group, parameter)
            if self._has_kernels(parameter):
                if id(group) not in rates:
                    rates[id(group)] = _on_device(group["lr"], parameter.device)
                self._launch(number, group, parameter, rates[id(group)])
            else:
                self._compute(number, group, parameter)
        steps = [self._optimizer.state[p]["step"] for _, _, p in work if "step" in self._state(p)]
        if steps:
            one = torch.ones_like(steps[0])
            moved = one if self._scale is None else one - self._scale.found_inf
            foreach_add_(steps, [moved] * len(steps))

    def _state(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state[parameter]
        return state

    def _keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        if isinstance(self._optimizer, SGD):
            return ("momentum_buffer",) if group["momentum"] else ()
        return "exp_avg", "exp_avg_sq"

    def _begin(self, group: dict[str, Any], parameter: torch.Tensor) -> None:
        """State of before the first update."""
        state = self._state(parameter)
        if not isinstance(self._optimizer, SGD) and "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for key in self._keys(group):
            if state.get(key) is None:
                self._codes.make(state, key, parameter)

    # -- kernels -------------------------------------------------------------------------------

    def _has_kernels(self, parameter: torch.Tensor) -> bool:
        assert parameter.grad is not None
        return (
            on_cuda(parameter)
            and expected()
            and parameter.dtype in (torch.float32, *DROPPED_BITS)
            and parameter.grad.dtype in (torch.float32, *DROPPED_BITS)
            and is_dense(parameter)
            and lies_as(parameter.grad, parameter)
        )

    def _launch(self, number: int, group: dict[str, Any], p: torch.Tensor, rate: Any) -> None:
        state, keys = self._state(p), self._keys(group)
        held = [state[key] for key in keys]
        scales = [state[key + SCALE] for key in keys if key + SCALE in state]
        assert p.grad is not None
        if is_fake(p):
            launched("quantized_update", [p.grad, rate], [p.detach(), *held, *scales])
            return
        assert has_triton()
        from . import fused  # needs Triton

        bits = self._codes.bits if scales else 32
        given = p.detach(), p.grad, held, scales or held
        fused.launch(*given, state, group, rate, self._noise.counter, number, self._scale, bits)
        increment_version(p)  # autograd does not see kernels write

    # -- PyTorch -------------------------------------------------------------------------------

    def _compute(self, number: int, group: dict[str, Any], parameter: torch.Tensor) -> None:
        """Piece by piece, in the order of memory."""
        held = parameter.detach()
        assert parameter.grad is not None
        gradient = parameter.grad
        whole = is_dense(held)
        target = held if whole else held.contiguous()
        if not lies_as(gradient, target):
            gradient = dense_like(target, gradient.dtype).copy_(gradient)
        flat, flat_gradient = flat_of(target), flat_of(gradient)
        skip = None
        if self._scale is not None:
            skip = self._scale.found_inf > 0
        if is_fake(flat):
            self._show(group, parameter, flat)
        for start in () if is_fake(flat) else range(0, flat.numel(), self._elements):
            part = slice(start, min(start + self._elements, flat.numel()))
            self._piece(number, group, parameter, flat[part], flat_gradient[part], part, skip)
        if not whole:
            held.copy_(target)

    def _show(self, group: dict[str, Any], parameter: torch.Tensor, flat: torch.Tensor) -> None:
        """In a prediction: one operation, beside what a piece takes, not hundreds."""
        state, keys = self._state(parameter), self._keys(group)
        held = [state[name] for key in keys for name in (key, key + SCALE) if name in state]
        taken = piece_bytes(min(flat.numel(), self._elements), len(keys), self._codes.bits)
        scratch = flat.new_empty(taken, dtype=torch.uint8)
        assert parameter.grad is not None
        launched("quantized_update", [parameter.grad, scratch], [flat, *held])

    def _piece(
        self,
        number: int,
        group: dict[str, Any],
        parameter: torch.Tensor,
        target: torch.Tensor,
        gradient: torch.Tensor,
        part: slice,
        skip: torch.Tensor | None,
    ) -> None:
        state, count = self._state(parameter), target.numel()
        wide = torch.promote_types(parameter.dtype, torch.float32)
        p, g = target.to(wide, copy=True), gradient.to(wide, copy=True)
        if self._scale is not None:
            g.mul_(self._scale.scale.reciprocal())
        if group.get("maximize"):
            g.neg_()
        moments = {key: self._read(state, key, part, wide) for key in self._keys(group)}
        flat = {key: rows.view(-1)[:count] for key, rows in moments.items()}
        if isinstance(self._optimizer, SGD):
            _sgd(p, g, flat, group)
        else:
            _adam(p, g, flat, group, state["step"])
        bits = random_bits(self._noise.counter, number, part.start, count)
        self._store(target, p, bits, skip)
        for (key, rows), shift in zip(moments.items(), SHIFTS, strict=False):
            self._keep(state, key, part, rows, bits, shift, skip)

    def _read(
        self, state: dict[str, Any], key: str, part: slice, wide: torch.dtype
    ) -> torch.Tensor:
        """Whole blocks in FP32, one row each; FP32 moments as they are, a copy."""
        if key + SCALE not in state:
            return flat_of(state[key])[part].to(wide, copy=True)[None]
        rows, codes = self._rows(state, key, part)
        made = decode(codes, state[key + SCALE][rows], self._codes.bits, signed=SIGNED[key])
        return (made if SIGNED[key] else made.square_()).to(wide)

    def _rows(self, state: dict[str, Any], key: str, part: slice) -> tuple[slice, torch.Tensor]:
        size = BLOCK[self._codes.bits]
        rows = slice(part.start // size, -(-part.stop // size))
        each = size * self._codes.bits // 8
        return rows, state[key][rows.start * each : rows.stop * each]

    def _keep(
        self,
        state: dict[str, Any],
        key: str,
        part: slice,
        rows: torch.Tensor,
        bits: torch.Tensor,
        shift: int,
        skip: torch.Tensor | None,
    ) -> None:
        if key + SCALE not in state:
            held = flat_of(state[key])[part]
            made = rows.view(-1)
            held.copy_(made if skip is None else torch.where(skip, held, made))
            return
        noise = rows.new_full((rows.numel(),), 0.5, dtype=torch.float32)
        noise[: bits.numel()] = noise_of(bits, shift)
        values = rows.float() if SIGNED[key] else rows.float().clamp_(min=0).sqrt_()
        made, scale = encode(values, noise.view(rows.shape), self._codes.bits, signed=SIGNED[key])
        which, codes = self._rows(state, key, part)
        scales = state[key + SCALE][which]
        if skip is not None:
            made, scale = torch.where(skip, codes, made), torch.where(skip, scales, scale)
        codes.copy_(made)
        scales.copy_(scale)

    def _store(
        self, target: torch.Tensor, p: torch.Tensor, bits: torch.Tensor, skip: torch.Tensor | None
    ) -> None:
        """The new parameter, 16-bit ones rounded at random."""
        if target.dtype in DROPPED_BITS:
            dropped = DROPPED_BITS[target.dtype]
            noise = bits & ((1 << dropped) - 1)
            rounded = noise.add_(p.view(torch.int32)).bitwise_and_(-(1 << dropped))
            p = torch.where(p.isfinite(), rounded.view(torch.float32), p)
        made = p.to(target.dtype)
        target.copy_(made if skip is None else torch.where(skip, target, made))


def piece_bytes(elements: int, moments: int, bits: int) -> int:
    """While so many are updated: weight, gradient and random bits; moments in whole blocks."""
    blocks = blocks_of(elements, bits)
    return 12 * elements + (20 + 4 * moments) * BLOCK[bits] * blocks + 8 * blocks


def piece_elements(total: int) -> int:
    """Elements that are in FP32 at a time: a 64th of all, in whole blocks, within bounds."""
    return min(max(total // 64 // _LEAST * _LEAST, _LEAST), _MOST)


def _sgd(
    p: torch.Tensor, g: torch.Tensor, moments: dict[str, torch.Tensor], group: dict[str, Any]
) -> None:
    g.add_(p, alpha=group["weight_decay"])
    if moments:
        m = moments["momentum_buffer"].mul_(group["momentum"]).add_(g)
        g = g.add_(m, alpha=group["momentum"]) if group["nesterov"] else m
    _take_away(p, g, group["lr"])


def _adam(
    p: torch.Tensor,
    g: torch.Tensor,
    moments: dict[str, torch.Tensor],
    group: dict[str, Any],
    step: torch.Tensor,
) -> None:
    (first, second), lr = group["betas"], group["lr"]
    if not group.get("decoupled_weight_decay", False):
        g.add_(p, alpha=group["weight_decay"])
    m = moments["exp_avg"].mul_(first).add_(g, alpha=1 - first)
    v = moments["exp_avg_sq"].mul_(second).addcmul_(g, g, value=1 - second)
    t = step.double() + 1
    lacks = (-torch.expm1(t * (math.log(beta) if beta else -math.inf)) for beta in (first, second))
    lack_first, lack_second = (lack.to(p.dtype) for lack in lacks)
    if group.get("decoupled_weight_decay", False):
        p.mul_(1 - lr * group["weight_decay"])
    root = v.sqrt().div_(lack_second.sqrt()).add_(group["eps"])
    _take_away(p, torch.div(m, root, out=root).div_(lack_first), lr)


def _take_away(p: torch.Tensor, move: torch.Tensor, rate: float | torch.Tensor) -> None:
    if isinstance(rate, torch.Tensor):
        p.sub_(move.mul(rate.to(p.device)))
    else:
        p.add_(move, alpha=-rate)


def _on_device(rate: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(rate, torch.Tensor):
        return rate.to(device)
    return torch.full((), rate, dtype=torch.float32, device=device)
