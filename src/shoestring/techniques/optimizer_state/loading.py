"""State from elsewhere: of plain training, of another technique, of a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from ...errors import InputError
from .storage import SCALE, SIGNED, MomentCodes

MARK = "moments_in_bits"


class CodedState:
    """Keeps the state of an optimizer in codes, whatever is put there."""

    def __init__(self, optimizer: Optimizer, codes: MomentCodes) -> None:
        self._optimizer, self._codes = optimizer, codes
        self._loaded: dict[torch.Tensor, dict[str, Any]] = {}

    def convert_state(
        self, meant: Callable[[torch.Tensor, str, torch.Tensor], torch.Tensor | None]
    ) -> Callable[[], None]:
        """Store what state there is, and what is loaded later. Returns the undo.

        `meant` reads a moment that another technique has stored in its own way.
        """
        optimizer = self._optimizer
        original = dict(optimizer.state)
        for parameter, state in original.items():
            found = {k: meant(parameter, k, v) for k, v in state.items() if k in SIGNED}
            others = {k: v for k, v in state.items() if k == "step"}
            optimizer.state[parameter] = self._stored(parameter, {**others, **found})
        handles = (
            optimizer.register_load_state_dict_pre_hook(self._loading, prepend=True),
            optimizer.register_load_state_dict_post_hook(self._put_back),
            optimizer.register_state_dict_post_hook(self._marked),
        )

        def undo() -> None:
            for handle in handles:
                handle.remove()
            optimizer.state.clear()
            optimizer.state.update(original)

        return undo

    def _stored(self, parameter: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, value in state.items():
            if key in SIGNED and isinstance(value, torch.Tensor):
                self._codes.write(made, key, parameter, value.to(parameter.device))
            elif key == "step" and not isinstance(self._optimizer, SGD):
                made[key] = torch.as_tensor(value, dtype=torch.float32).to(
                    parameter.device, copy=True
                )
        return made

    def _loading(self, optimizer: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        """PyTorch casts all state to the parameter's type: moments go around it."""
        marks = [group[MARK] for group in loaded["param_groups"] if MARK in group]
        if marks and marks[0] != self._codes.bits:
            raise InputError(
                f"the optimizer's state is in {marks[0]} bits, and this step keeps it in "
                f"{self._codes.bits}",
                hint=f"apply OptimizerState({marks[0]})",
            )
        groups = [group for group in loaded["param_groups"] if MARK not in group]
        names = [name for group in groups for name in group["params"]]
        held = [p for group in optimizer.param_groups for p in group["params"]]
        state = dict(loaded["state"])
        self._loaded = {}
        for name, parameter in zip(names, held, strict=False):
            if name in state:
                kept = {k: v for k, v in state[name].items() if k.removesuffix(SCALE) in SIGNED}
                self._loaded[parameter] = self._moments(parameter, kept)
                state[name] = {k: v for k, v in state[name].items() if k not in kept}
        return {**loaded, "param_groups": groups, "state": state}

    def _moments(self, parameter: torch.Tensor, given: dict[str, Any]) -> dict[str, Any]:
        """Codes as they are, moments of plain training in codes."""
        if not any(key.endswith(SCALE) for key in given):
            return self._stored(parameter, {k: v for k, v in given.items() if v is not None})
        made: dict[str, Any] = {}
        for key in given:
            if key in SIGNED:
                self._codes.make(made, key, parameter)
        for key, value in given.items():
            if key not in made or made[key].shape != value.shape or made[key].dtype != value.dtype:
                raise InputError(
                    f"the optimizer's {key} is of {value.numel()} {value.dtype} for a parameter of "
                    f"{parameter.numel()} elements",
                    hint="load the state of a step with the same plan and model",
                )
            made[key] = value.to(parameter.device, copy=True)
        return made

    def _put_back(self, optimizer: Optimizer) -> None:
        for parameter, moments in self._loaded.items():
            optimizer.state[parameter].update(moments)
        self._loaded = {}

    def _marked(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """With one group more than there is: a plain optimizer refuses it, ours takes it away."""
        if not any(k.endswith(SCALE) for held in state["state"].values() for k in held):
            return state
        mark = {"params": [], MARK: self._codes.bits}
        return {**state, "param_groups": [*state["param_groups"], mark]}
