"""How much of a budget a plan leaves free for what its prediction may miss."""

from __future__ import annotations

from dataclasses import dataclass

LEAST = 0.002
"""Of the whole budget: pages and blocks are not predicted one by one."""
_REPEATS = 1.003
"""Small steps are not predicted to the byte: some 256 come and go with caches in PyTorch."""


@dataclass(frozen=True)
class Margin:
    """A share of the budget, or of that part of it whose size is not known for certain."""

    share: float
    known_bytes: int = 0
    """Parameters, state and gradients, which take what they take."""

    def fraction(self, budget_bytes: int) -> float:
        """Left free of this budget."""
        if not 0 < self.known_bytes < budget_bytes:
            return self.share
        return max(self.share * (1 - self.known_bytes / budget_bytes), min(LEAST, self.share))

    def limit(self, budget_bytes: int) -> int:
        """The largest prediction that still counts as fitting."""
        return int(budget_bytes * (1 - self.fraction(budget_bytes)))

    def budget_for(self, needed_bytes: int) -> int:
        """The budget that a predicted peak needs; a little more where predictions may repeat."""
        if not self.share:
            return needed_bytes + 1
        needed = needed_bytes * (1 + (_REPEATS - 1) * self._uncertain(needed_bytes))
        whole = needed / (1 - self.share)
        if 0 < self.known_bytes < needed_bytes:
            part = (needed - self.share * self.known_bytes) / (1 - self.share)
            whole = max(part, needed / (1 - min(LEAST, self.share)))
        return int(whole) + 1

    def _uncertain(self, nbytes: int) -> float:
        return 1 - self.known_bytes / nbytes if 0 < self.known_bytes < nbytes else 1.0
