"""The optimizer's own arithmetic in FP32, on one block at a time; storage in 16 bits.

Each block of parameters, gradients and state is copied to FP32, unscaled, given to a copy of the
user's optimizer that holds this block alone, and written back. So weight decay, Nesterov's
momentum or AMSGrad are PyTorch's, settings are read from `param_groups` at every step, and the
state is in `optimizer.state`. On CUDA, SGD and Adam need no copies: SGD's fused kernel computes in
FP32 on FP16 tensors (the CPU's leaves most of them untouched, pytorch#191763), and where numbers
are scaled or rounded at random, the kernels are ours.

One update, from the three ways the one that can:

    look for infinities in the gradients (FP16)  →  skip, on the device
      1 SGD, nearest, on CUDA     `_can_fuse`       one fused kernel over all parameters
      2 usual settings on CUDA    `_has_kernels`    `fused.py`: in place, each piece where it lies
      3 otherwise                 `_update`         block by block:

         16 bits                       FP32, one block at a time (at most 1/16 of the model)
         parameter ── gather ──►  wide ───────┐
         gradient  ── gather ──►  · 1/scale ──┼─► reference optimizer .step() on this block alone
         moments   ── read ────►  · 2^-e, x² ─┘        │
         parameter ◄── round, unless skip ─────────────┤
         moments   ◄── √x, · 2^e, round, unless skip ──┘

    move the loss scale
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from ...kernels import expected
from ...kernels.rounding import Noise
from ...torch_private.fake_tensors import FakeTensor
from ...torch_private.kernels import foreach_mul_
from ...trace.cuda import is_dense, lies_as, on_cuda
from ...trace.fakes import is_fake, readable
from ...trace.passes import standing_for
from ..optimizers import ELEMENTWISE
from .blocks import Piece, Rows, UpdateBlock, block_elements, blocks, cut, gather
from .check import misled
from .loading import StoredState
from .moments import SUFFIX, MomentStorage, is_moment, write
from .reference_copy import fused_sgd, reference_copy, single
from .scaling import LossScale

Gradients = list[tuple[dict[str, Any], torch.Tensor]]


class NarrowUpdate:
    """Gradients → parameters, in place of `optimizer.step`."""

    def __init__(
        self,
        optimizer: Optimizer,
        scale: LossScale | None,
        noise: Noise,
        *,
        stochastic: bool,
        scaled_moments: bool = True,
    ) -> None:
        self._optimizer, self._scale = optimizer, scale
        self._drawing = noise
        self._noise = noise if stochastic else None
        # A momentum too small for FP16 moves no FP16 weight: lr · 6e-8 is under half its ulp.
        scaled = scaled_moments and not isinstance(optimizer, SGD)
        self._storage = MomentStorage(noise if scaled or stochastic else None, scaled=scaled)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self.elements = block_elements(sum(p.numel() for p in held))
        """Of a block; the same where ranks split what the optimizer holds."""
        self._elementwise = type(optimizer) in ELEMENTWISE
        self._reference = reference_copy(optimizer)
        self.state = StoredState(optimizer, self._storage, self._rows)

    @torch.no_grad()
    def __call__(self) -> None:
        """One update; skipped on the device, without waiting for it, if a gradient overflowed."""
        optimizer, scale = self._optimizer, self._scale
        given = self._gradients()
        for before in optimizer._optimizer_step_pre_hooks.values():
            before(optimizer, (), {})
        if scale is not None and given != self._gradients():
            raise misled("a hook of the optimizer's step")
        work = [
            (group, parameter)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and parameter.numel()
        ]
        skip, inverse = None, None
        if scale is not None:
            scale.look_for_overflow([parameter.grad for _, parameter in work])
            skip, inverse = scale.found_inf > 0, scale.scale.reciprocal()
        if scale is not None and self._can_fuse(work):
            self._begun(work)
            fused_sgd(optimizer, work, scale.scale, scale.found_inf)
        elif self._has_kernels(work):
            self._begun(work)
            self._run_kernels(work)
        else:
            begun, unknown = self._begun(work)
            for group, parameter in unknown:
                self._first(group, parameter, skip, inverse)
            for block in self._blocks(begun):
                with standing_for(block.times):
                    self._update(block, skip, inverse)
        if scale is not None:
            scale.adjust()
        optimizer._opt_called = True  # type: ignore[attr-defined] # asked by LR schedulers
        for after in optimizer._optimizer_step_post_hooks.values():
            after(optimizer, (), {})

    def _gradients(self) -> list[tuple[int, int]]:
        """Which tensors they are, and how often they were written; nothing where nobody asks."""
        if not self._optimizer._optimizer_step_pre_hooks:
            return []
        held = (p.grad for group in self._optimizer.param_groups for p in group["params"])
        return [(id(g), g._version) for g in held if g is not None]

    def _begun(self, work: Gradients) -> tuple[Gradients, Gradients]:
        """Make the state of before the first update; apart, those whose first state is unknown."""
        begun: Gradients = []
        unknown: Gradients = []
        for group, parameter in work:
            state = self._optimizer.state[parameter]
            keys: list[str] | None = None
            if isinstance(self._optimizer, (Adam, AdamW)):
                keys = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(group["amsgrad"])
            elif isinstance(self._optimizer, SGD) and not group["momentum"]:
                keys = []
            elif isinstance(self._optimizer, SGD) and not group["dampening"]:
                keys = ["momentum_buffer"]
            has_state = any(value is not None for value in state.values())
            (begun if has_state or keys is not None else unknown).append((group, parameter))
            if not has_state:
                if isinstance(self._optimizer, (Adam, AdamW)):
                    state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                for key in keys or ():
                    self._storage.make(state, key, parameter.detach(), len(self._rows(parameter)))
        return begun, unknown

    def _first(
        self,
        group: dict[str, Any],
        parameter: torch.Tensor,
        skip: torch.Tensor | None,
        inverse: torch.Tensor | None,
    ) -> None:
        """A first update, of a whole tensor.

        One to be skipped is still to come; on CUDA, where no value is read, the gradient is zero.
        """
        if skip is not None and readable(skip) and bool(skip):
            return
        block = UpdateBlock(group, (), [Piece(parameter, ..., 0, True)])
        (made,) = self._computed(block, [{}], skip, inverse, zero=True)
        self._optimizer.state[parameter] = self.state.stored(parameter, made)

    def _update(
        self, block: UpdateBlock, skip: torch.Tensor | None, inverse: torch.Tensor | None
    ) -> None:
        states = [self._optimizer.state[piece.parameter] for piece in block.pieces]
        read = {key: self._storage.read(block, states, key) for key in block.keys}
        if "grad_avg" in read and "square_avg" in read:
            eps = torch.finfo(states[0]["grad_avg"].dtype).eps
            _no_negative_variance(read["square_avg"].whole, read["grad_avg"].whole, eps)
        given = [
            {
                **{k: _copy(v) for k, v in state.items() if k not in read and SUFFIX not in k},
                **{key: flat.views[position] for key, flat in read.items()},
            }
            for position, state in enumerate(states)
        ]
        made = self._computed(block, given, skip, inverse)
        for key, flat in read.items():
            if any(new[key] is not view for new, view in zip(made, flat.views, strict=True)):
                flat = gather([new[key] for new in made], torch.float32)
            self._storage.write(block, states, key, flat, skip)
        for piece, state, new in zip(block.pieces, states, made, strict=True):
            for key in new if piece.last else ():
                if key not in read:
                    _keep(state, key, new[key], skip)

    def _computed(
        self,
        block: UpdateBlock,
        given: list[dict[str, Any]],
        skip: torch.Tensor | None,
        inverse: torch.Tensor | None,
        *,
        zero: bool = False,
    ) -> list[dict[str, Any]]:
        """Move the block's parameters; the state the optimizer left, in FP32."""
        narrow = [piece.narrow for piece in block.pieces]
        wide = gather(narrow, torch.float32)
        gradient = gather([piece.gradient for piece in block.pieces], torch.float32)
        if inverse is not None:
            gradient.whole.mul_(inverse)
        if zero and skip is not None:
            gradient.whole.masked_fill_(skip, 0)
        for view, part in zip(wide.views, gradient.views, strict=True):
            view.grad = part
        settings = {**block.group, **single(self._optimizer, block.group, wide.whole)}
        self._reference.param_groups = [{**settings, "params": wide.views}]
        self._reference.state = defaultdict(dict, zip(wide.views, given, strict=True))
        self._reference.step()
        made = [self._reference.state.pop(view) for view in wide.views]
        self._reference.param_groups = []  # it would keep the copies alive until the next update
        write(narrow, wide, self._noise, skip)
        return made

    def _rows(self, parameter: torch.Tensor) -> list[Rows]:
        return cut(parameter, self.elements) if self._elementwise else [...]

    def _blocks(self, work: Gradients) -> list[UpdateBlock]:
        listed = [(group, self._keys(p), p, self._rows(p)) for group, p in work]
        return list(blocks(listed, self.elements if self._elementwise else 0))

    def _keys(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """The moments that are kept for each element."""
        return tuple(
            key
            for key, value in self._optimizer.state[parameter].items()
            if is_moment(key, value) and value.shape == parameter.shape and SUFFIX not in key
        )

    def _can_fuse(self, work: Gradients) -> bool:
        return (
            type(self._optimizer) is SGD
            and self._noise is None
            and all(on_cuda(p) and not group["dampening"] for group, p in work)
        )

    def _has_kernels(self, work: Gradients) -> bool:
        """Whether every tensor lies as its gradient, and the settings are the usual ones."""
        return (
            (self._storage.scaled or type(self._optimizer) is SGD)
            and bool(work)
            and all(on_cuda(p) and self._alike(p) for _, p in work)
            and kernels_know(self._optimizer)
        )

    def _alike(self, parameter: torch.Tensor) -> bool:
        """Whether one offset finds the same element in parameter, gradient and moments."""
        beside = [parameter.grad, *self._optimizer.state[parameter].values()]
        return (
            type(parameter) in (torch.Tensor, torch.nn.Parameter, FakeTensor)
            and is_dense(parameter)
            and all(
                lies_as(other, parameter)
                for other in beside
                if isinstance(other, torch.Tensor) and other.shape == parameter.shape
            )
        )

    def _run_kernels(self, work: Gradients) -> None:
        states = self._optimizer.state
        if any(is_fake(parameter) for _, parameter in work):  # read and written where they are
            moments = [states[p][key] for _, p in work for key in self._keys(p)]
            foreach_mul_([*(p.detach() for _, p in work), *moments], 1)
            return
        blocks = self._blocks(work)
        from . import fused  # needs Triton

        update = fused.sgd if isinstance(self._optimizer, SGD) else fused.adam
        update(states, blocks, self._drawing, self._scale, stochastic=self._noise is not None)


def kernels_know(optimizer: Optimizer) -> bool:
    """Whether there are CUDA kernels for its arithmetic, which need no copies."""
    return (
        type(optimizer) in (SGD, Adam, AdamW)
        and all(_is_usual(group) for group in optimizer.param_groups)
        and expected()
    )


def _is_usual(group: dict[str, Any]) -> bool:
    rate = group["lr"]
    return (
        not any(group.get(name) for name in ("amsgrad", "maximize", "differentiable", "dampening"))
        and all(isinstance(beta, float) for beta in group.get("betas", ()))
        and (not isinstance(rate, torch.Tensor) or on_cuda(rate))
    )


def _no_negative_variance(squares: torch.Tensor, means: torch.Tensor, eps: float) -> None:
    """RMSprop's centered variance is a difference: at least what rounding left unknown of it."""
    torch.maximum(squares, means.square().mul_(1 + eps), out=squares)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _keep(state: dict[str, Any], key: str, value: Any, skip: torch.Tensor | None) -> None:
    """A counter after the update, or as it was; one that is not a tensor counts skipped steps too.

    In place, since a captured graph reads it where it was.
    """
    before = state.get(key)
    if not isinstance(before, torch.Tensor) or not isinstance(value, torch.Tensor):
        state[key] = value
    else:
        before.copy_(value if skip is None else torch.where(skip, before, value))
