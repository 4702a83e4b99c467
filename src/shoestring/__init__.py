"""Train neural networks in a small, known amount of memory.

`profile` shows where every byte of a training step goes before anything is allocated; `measure`
runs a real step and says what it needed.
"""

from .errors import BudgetError, NoEffectWarning, ShoestringError
from .memory.measure import Measurement, measure
from .memory.model import MemoryProfile
from .profiling import profile
from .techniques import Checkpointing, Microbatching, Precision, Sparsity

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "Checkpointing",
    "Measurement",
    "MemoryProfile",
    "Microbatching",
    "NoEffectWarning",
    "Precision",
    "ShoestringError",
    "Sparsity",
    "measure",
    "profile",
]
