"""Optimizer state that was there before, or is loaded: into 16 bits, and told from plain state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from ...errors import InputError
from ...trace.fakes import EACH
from .blocks import Piece, Rows, UpdateBlock, gather
from .convert import cast
from .moments import SUFFIX, MomentStorage, is_moment


class StoredState:
    """State as an update in 16 bits keeps it."""

    def __init__(
        self,
        optimizer: Optimizer,
        storage: MomentStorage,
        rows: Callable[[torch.Tensor], list[Rows]],
    ) -> None:
        self._optimizer, self._storage, self._rows = optimizer, storage, rows

    def convert(self) -> Callable[[], None]:
        """Store what state there is; state loaded later from an FP32 run too. Returns the undo."""
        optimizer = self._optimizer
        for number, hook in list(optimizer._optimizer_step_pre_hooks.items()):
            if hook is _refuse:  # a step before this one is gone
                del optimizer._optimizer_step_pre_hooks[number]
        original = dict(optimizer.state)
        for parameter, state in original.items():
            optimizer.state[parameter] = self.stored(parameter, state)
        handles = (
            optimizer.register_load_state_dict_pre_hook(self._loading),
            optimizer.register_state_dict_post_hook(_marked),
        )

        def undo() -> None:
            for handle in handles:
                handle.remove()
            optimizer.state.clear()
            optimizer.state.update(original)

        return undo

    def _loading(self, optimizer: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        groups = [group for group in loaded["param_groups"] if _MARK not in group]
        loaded = {**loaded, "param_groups": groups}
        names = [name for group in groups for name in group["params"]]
        held = [p for group in optimizer.param_groups for p in group["params"]]
        parameters = dict(zip(names, held, strict=False))
        state = {
            name: self.stored(parameters[name], value) if name in parameters else value
            for name, value in loaded["state"].items()
        }
        return {**loaded, "state": state}

    @torch.no_grad()
    def stored(self, parameter: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """State of any kind as it is kept; a copy."""
        made: dict[str, Any] = {}
        for key, value in state.items():
            if not isinstance(value, torch.Tensor):
                made[key] = value
                continue
            value = value.to(parameter.device, copy=True)
            if not is_moment(key, value) or value.dtype is parameter.dtype:
                made[key] = value
            elif SUFFIX in key:
                made[key] = cast(value, parameter.dtype)
            elif value.shape != parameter.shape:
                made[key] = value
            else:
                rows = self._rows(parameter)
                self._storage.make(made, key, parameter.detach(), len(rows))
                for index, part in enumerate(rows):
                    block = UpdateBlock({}, (key,), [Piece(parameter, part, index, True)])
                    wide = gather([value[part]], torch.float32)
                    self._storage.write(block, [made], key, wide, None)
        return made


def guard(optimizer: Optimizer) -> None:
    """Once no step reads moments with exponents any more: the optimizer's own step refuses them."""
    if any(SUFFIX in key for held in optimizer.state.values() for key in held):
        optimizer.register_step_pre_hook(_refuse)


def _refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if any(SUFFIX in key for held in optimizer.state.values() for key in held):
        raise InputError(
            f"the moments of this {type(optimizer).__name__} are kept times powers of two, by an "
            "fp16 step that is gone: a plain update would move weights too far",
            hint="keep the step and call it, apply fp16 again, or make a new optimizer",
        )


setattr(_refuse, EACH, True)


_MARK = "moments_in_16_bits"


def _marked(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A state with exponents beside its moments, with one group more than there is.

    A plain optimizer would take it for its own, without the exponents, and train on wrong moments;
    so it says that the number of groups differs. Ours takes the group away.
    """
    if not any(SUFFIX in key for held in state["state"].values() for key in held):
        return state
    return {**state, "param_groups": [*state["param_groups"], {"params": [], _MARK: True}]}
