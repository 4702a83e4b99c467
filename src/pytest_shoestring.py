"""pytest plugin: the fixture `peak`, the predicted peak memory of a training step.

    def test_fits(peak):
        assert peak(model, batch, loss=loss, optimizer="adamw", device="cuda") < "8 GB"

Nothing is allocated and no GPU is needed. It stands outside of the package, so that pytest starts
as fast as before where nobody asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest


class Peak(int):
    """Bytes that compare with text: `peak(…) < "8 GB"`."""

    @staticmethod
    def _bytes(other: Any) -> Any:
        from shoestring.units import parse_size

        return parse_size(other) if isinstance(other, str) else other

    def __lt__(self, other: Any) -> bool:
        return int(self) < self._bytes(other)

    def __le__(self, other: Any) -> bool:
        return int(self) <= self._bytes(other)

    def __gt__(self, other: Any) -> bool:
        return int(self) > self._bytes(other)

    def __ge__(self, other: Any) -> bool:
        return int(self) >= self._bytes(other)

    def __eq__(self, other: Any) -> bool:
        return int(self) == self._bytes(other)

    def __ne__(self, other: Any) -> bool:
        return int(self) != self._bytes(other)

    __hash__ = int.__hash__

    def __repr__(self) -> str:
        from shoestring.units import format_size

        return f"<peak of {format_size(int(self), digits=2)}>"


@pytest.fixture
def peak() -> Callable[..., Peak]:
    """`peak(model, batch, loss=…, optimizer=…, device="cuda", techniques=…)` → bytes.

    `model` may be the name of a configuration, "hf:FOLDER" or "timm:NAME", with `tokens=`,
    `batch=`, `lora=`, `quantize=` and `dtype=` in place of a batch and a loss.
    """

    def predicted(
        model: Any,
        batch: Any = None,
        *,
        loss: Any = None,
        optimizer: Any = "adamw",
        device: Literal["cpu", "cuda"] = "cuda",
        techniques: Any = (),
        **how: Any,
    ) -> Peak:
        import shoestring as ss

        if isinstance(model, str):
            from shoestring.integrations.configurations import PREFIXES, Configured, loss_of

            unknown = [name for name in how if name not in Configured.__dataclass_fields__]
            if unknown or not model.startswith(PREFIXES):
                what = f"take {unknown[0]}=" if unknown else f"know the configuration {model}"
                raise ss.InputError(
                    f"peak of a configuration does not {what}",
                    hint="peak('hf:FOLDER', tokens=…, batch=…, lora=…, quantize=…, dtype=…), or "
                    "peak(model, batch, loss=…, optimizer=…, device=…)",
                )
            size = {} if batch is None else {"batch": batch}
            model, batch = Configured(model, **size, **how).build()
            loss = loss or loss_of
        elif how or loss is None:
            raise ss.InputError(
                f"peak of a model does not take {next(iter(how), 'no loss')}",
                hint="peak(model, batch, loss=…, optimizer=…, device=…, techniques=…)",
            )
        found = ss.profile(
            model, batch, loss=loss, optimizer=optimizer, accounting="device", device=device,
            techniques=techniques,
        )  # fmt: skip
        return Peak(found.peak_bytes)

    return predicted
