"""The optimizer's own arithmetic in FP32, on a block of one tensor at a time; storage in 16 bits.

Each block of a parameter, its gradient and its state is copied to FP32, unscaled, given to a twin
of the user's optimizer that holds this block alone, and written back. So weight decay, Nesterov's
momentum or AMSGrad are PyTorch's, settings are read from `param_groups` at every step, and the
state is in `optimizer.state`. On CUDA, SGD needs no copies: its fused kernel computes in FP32 on
FP16 tensors (the CPU's leaves most of them untouched, pytorch#191763).
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from .convert import cast
from .moments import SUFFIX, Storage, blocks, write
from .rounding import Noise
from .scaling import LossScale

_ELEMENTWISE = frozenset(
    {
        SGD, Adam, AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta,
        torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    }
)  # fmt: skip
"""Optimizers that treat every element alone, so that a tensor may be updated in blocks."""


class Update:
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
        self._optimizer, self._scale, self._noise = optimizer, scale, noise
        self._stochastic = stochastic
        # A momentum too small for FP16 moves no FP16 weight: lr · 6e-8 is under half its ulp.
        self._plain = isinstance(optimizer, SGD)
        scaled = scaled_moments and not self._plain
        self._storage = Storage(noise if scaled or stochastic else None, scaled=scaled)
        self._twin = _twin(optimizer)

    @torch.no_grad()
    def __call__(self) -> None:
        """One update; skipped on the device, without waiting for it, if a gradient overflowed."""
        optimizer, scale = self._optimizer, self._scale
        for before in optimizer._optimizer_step_pre_hooks.values():
            before(optimizer, (), {})
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
        if self._can_fuse(work):
            self._fused(work)
        else:
            for group, parameter in work:
                self._one(group, parameter, skip, inverse)
        if scale is not None:
            scale.adjust()
        optimizer._opt_called = True  # type: ignore[attr-defined] # asked by LR schedulers
        for after in optimizer._optimizer_step_post_hooks.values():
            after(optimizer, (), {})

    def _one(
        self,
        group: dict[str, Any],
        parameter: torch.Tensor,
        skip: torch.Tensor | None,
        inverse: torch.Tensor | None,
    ) -> None:
        state = self._optimizer.state[parameter]
        pieces = list(blocks(parameter)) if type(self._optimizer) in _ELEMENTWISE else [...]
        if not state:
            self._begin(group, parameter, state, len(pieces))
        before = dict(state)
        twin = self._twin
        for index, rows in enumerate(pieces):
            narrow = parameter.detach()[rows]
            wide = narrow.to(torch.float32, copy=True)
            wide.grad = parameter.grad[rows].to(torch.float32, copy=True)  # type: ignore[index]
            if inverse is not None:
                wide.grad.mul_(inverse)
            if skip is not None and not before:  # its first state is not ours to take back
                wide.grad = torch.where(skip, 0, wide.grad)
            twin.param_groups = [
                {**group, **_single(self._optimizer, group, wide), "params": [wide]}
            ]
            twin.state = defaultdict(dict, {wide: self._read(before, rows, index)})
            twin.step()
            made = twin.state.pop(wide)
            if self._stochastic and narrow.dtype is not torch.float32:
                write(narrow, self._noise.rounded(wide, narrow.dtype), skip)
            else:
                write(narrow, wide.to(narrow.dtype), skip)
            for key, value in made.items():
                if not _is_moment(value):
                    if index == len(pieces) - 1:
                        state[key] = _kept(before.get(key), value, skip)
                    continue
                if key not in state:
                    like = parameter if value.shape == wide.shape else value.to(parameter.dtype)
                    self._storage.make(state, key, like.detach(), len(pieces))
                self._storage.write(state, key, rows, index, value, skip)

    def _read(self, state: dict[str, Any], rows: Any, index: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in state.items():
            if key.endswith(SUFFIX):
                continue
            if _is_moment(value):
                found[key] = self._storage.read(state, key, rows, index)
            else:
                found[key] = value.clone() if isinstance(value, torch.Tensor) else value
        return found

    def _begin(
        self, group: dict[str, Any], parameter: torch.Tensor, state: dict[str, Any], count: int
    ) -> None:
        """The state before the first update, where it is known, so that it too can be skipped."""
        if isinstance(self._optimizer, (Adam, AdamW)):
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            moments = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(group["amsgrad"])
            for key in moments:
                self._storage.make(state, key, parameter.detach(), count)
        elif self._plain and group["momentum"] and not group["dampening"]:
            self._storage.make(state, "momentum_buffer", parameter.detach(), count)

    def _can_fuse(self, work: list[tuple[dict[str, Any], torch.Tensor]]) -> bool:
        return (
            type(self._optimizer) is SGD
            and self._scale is not None
            and not self._stochastic
            and all(p.is_cuda and not group["dampening"] for group, p in work)
        )

    def _fused(self, work: list[tuple[dict[str, Any], torch.Tensor]]) -> None:
        """One kernel for all tensors of a group and a type; it unscales, and skips by itself."""
        assert self._scale is not None
        alike: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        groups = {id(group): group for group, _ in work}
        for group, parameter in work:
            alike.setdefault((id(group), parameter.dtype), []).append(parameter)
        for (name, _), parameters in alike.items():
            group = groups[name]
            momenta = []
            for parameter in parameters:
                state = self._optimizer.state[parameter]
                if group["momentum"] and state.get("momentum_buffer") is None:
                    self._storage.make(state, "momentum_buffer", parameter.detach(), 1)
                if group["momentum"]:
                    momenta.append(state["momentum_buffer"])
            torch._fused_sgd_(
                [parameter.detach() for parameter in parameters],
                [parameter.grad for parameter in parameters if parameter.grad is not None],
                momenta,
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=0.0,
                nesterov=group["nesterov"],
                maximize=group["maximize"],
                is_first_step=False,
                grad_scale=self._scale.scale,
                found_inf=self._scale.found_inf,
            )

    def convert_state(self) -> Callable[[], None]:
        """Store what state there is; state loaded later from an FP32 run too. Returns the undo."""
        optimizer = self._optimizer
        original = dict(optimizer.state)
        for parameter, state in original.items():
            optimizer.state[parameter] = self._stored(parameter, state)
        handle = optimizer.register_load_state_dict_pre_hook(self._loading)

        def undo() -> None:
            handle.remove()
            optimizer.state.clear()
            optimizer.state.update(original)

        return undo

    def _loading(self, optimizer: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        names = [name for group in loaded["param_groups"] for name in group["params"]]
        held = [p for group in optimizer.param_groups for p in group["params"]]
        parameters = dict(zip(names, held, strict=False))
        state = {
            name: self._stored(parameters[name], value) if name in parameters else value
            for name, value in loaded["state"].items()
        }
        return {**loaded, "state": state}

    @torch.no_grad()
    def _stored(self, parameter: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        pieces = list(blocks(parameter)) if type(self._optimizer) in _ELEMENTWISE else [...]
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                made[key] = value
            elif not _is_moment(value) or value.dtype is parameter.dtype:
                made[key] = value.to(parameter.device, copy=True)
            elif self._plain or value.shape != parameter.shape or key.endswith(SUFFIX):
                made[key] = cast(value.to(parameter.device), parameter.dtype)
            else:
                self._storage.make(made, key, parameter.detach(), len(pieces))
                for index, rows in enumerate(pieces):
                    wide = value[rows].to(parameter.device, torch.float32)
                    self._storage.write(made, key, rows, index, wide, None)
        return made


def _is_moment(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0


def _kept(before: Any, value: Any, skip: torch.Tensor | None) -> Any:
    """A counter after the update, or as it was; one that is no tensor counts skipped steps too."""
    if skip is None or not isinstance(before, torch.Tensor) or not isinstance(value, torch.Tensor):
        return value
    return torch.where(skip, before, value)


def _twin(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class and attributes, whose parameters and state are set later."""
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a learning-rate scheduler binds it to the original
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    return twin


def _single(optimizer: Optimizer, group: dict[str, Any], tensor: torch.Tensor) -> dict[str, Any]:
    """Settings under which the twin reads no value of a tensor on the host."""
    chosen: dict[str, Any] = {}
    if "foreach" in group:
        chosen["foreach"] = False
    if "fused" in group:
        chosen["fused"] = isinstance(optimizer, (Adam, AdamW))
    if "capturable" in group:
        chosen["capturable"] = tensor.is_cuda
    return chosen
