"""What a plan may use, and how lossy each setting is taken to be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from ..errors import InputError

NAMES = ("exact", "lossless", "precision", "bn-microbatch", "sparsity")
_HINT = (
    "precision (16 bits; on by default), bn-microbatch (BatchNorm sees one microbatch), "
    "sparsity (fewer weights), lossless (none of these), exact (no bit differs)"
)


@dataclass(frozen=True)
class Allowed:
    """Which means may change what is computed; lossless ones are always allowed."""

    precision: bool = True
    bn_microbatch: bool = False
    sparsity: bool = False
    exact: bool = False
    """Only what changes no bit: no microbatches either, whose gradients are added in parts."""

    @classmethod
    def of(cls, allow: str | Iterable[str] | None) -> Allowed:
        """Read names, or text with commas. 'lossless' or nothing at all takes precision away."""
        if allow is None:
            return cls()
        given = allow.split(",") if isinstance(allow, str) else list(allow)
        names = {str(name).strip() for name in given if str(name).strip()}
        unknown = sorted(names - set(NAMES))
        if unknown:
            raise InputError(f"a plan cannot be allowed {unknown[0]!r}", hint=_HINT)
        if "exact" in names and len(names) > 1:
            raise InputError("'exact' allows nothing beside it", hint=_HINT)
        strict = {"exact", "lossless"} & names
        return cls(
            exact="exact" in names,
            precision="precision" in names or (bool(names) and not strict),
            bn_microbatch="bn-microbatch" in names,
            sparsity="sparsity" in names,
        )

    def __str__(self) -> str:
        """The names to ask for it; where another is named, precision goes without saying."""
        if self.exact:
            return "exact"
        others = [*(["bn-microbatch"] if self.bn_microbatch else ()),
                  *(["sparsity"] if self.sparsity else ())]  # fmt: skip
        if not self.precision:
            return ",".join(["lossless", *others])
        return ",".join(others) or "precision"

    def missing(self, batch_norm: bool) -> list[str]:
        """What could still be allowed, mildest first."""
        found = [*(["exact"] if self.exact else ()), *([] if self.precision else ["precision"])]
        if batch_norm and not self.bn_microbatch:
            found.append("bn-microbatch")
        return found if self.sparsity else [*found, "sparsity"]


# Points of accuracy lost, from the report's Table 2 and its study of microbatches: WRN-28-2 on
# CIFAR-10, 94.4% without. They order lossy settings; they promise nothing for another network.
_BY_DENSITY = ((1.0, 0.0), (0.3, 0.45), (0.2, 0.75), (0.1, 2.1), (0.05, 5.0))
_BY_MICROBATCH = ((8, 0.1), (4, 0.8), (2, 3.0), (1, 10.0))
PRECISION_LOSS = 0.01


def density_loss(density: float) -> float:
    """Expected points lost at a density, between the report's rows by a line."""
    for (high, less), (low, more) in pairwise(_BY_DENSITY):
        if density >= low:
            return less + (more - less) * (high - density) / (high - low)
    return _BY_DENSITY[-1][1] / density * _BY_DENSITY[-1][0]


def microbatch_loss(size: int) -> float:
    """Expected points lost when BatchNorm sees so many examples; alike from 8 on."""
    return next(loss for least, loss in _BY_MICROBATCH if size >= least)
