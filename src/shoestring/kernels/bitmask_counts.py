"""The counts of nonzeros that the bitmask kernels look up, and the room they take."""

from __future__ import annotations

import torch

COARSE, FINE = 4096, 64
"""Elements between the counts of nonzeros that kernels look up, and between those within them."""


def room_for_starts(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nonzeros before each 4,096 elements of a bitmask, and before each 64 within them, unknown."""
    words = -(-packed.numel() * 8 // FINE)
    blocks = -(-words * FINE // COARSE)
    return packed.new_empty(blocks, dtype=torch.int32), packed.new_empty(words, dtype=torch.int16)
