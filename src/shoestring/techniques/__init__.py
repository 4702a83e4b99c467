"""The report's four techniques, each a frozen setting that transforms a trace."""

from .base import Technique
from .checkpointing import Checkpointing
from .microbatching import Microbatching
from .precision import Precision
from .sparsity import Sparsity

__all__ = ["Checkpointing", "Microbatching", "Precision", "Sparsity", "Technique"]
