"""Turn off what a model drops at random, wherever its modules keep the probability."""

from __future__ import annotations

from torch import nn


def turn_off_dropout(model: nn.Module) -> None:
    """In place: p of dropout modules, and numbers named so in modules and in their `config`.

    Not `eval()`: that is another model where BatchNorm, auxiliary heads or cuDNN's LSTMs train.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for holder in (module, getattr(module, "config", None)):
            held = getattr(holder, "__dict__", {})  # written there, since a config may be frozen
            for name in [name for name in held if "drop" in name]:
                if isinstance(held[name], float):
                    held[name] = 0.0
