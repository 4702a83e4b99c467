"""Techniques: each a frozen setting that transforms a trace and a training step."""

from .activation_bits import ActivationBits
from .activation_offload import ActivationOffload
from .base import Technique
from .checkpointing import Checkpointing
from .chunked_loss import ChunkedLoss
from .compiled_blocks import CompiledBlocks
from .fused_update import FusedUpdate
from .gradient_release import GradientRelease
from .microbatching import Microbatching
from .mlp_tiles import TiledMLP
from .offload import Offload
from .optimizer_state import OptimizerState
from .precision import Precision
from .registry import register, registered
from .sparsity import Sparsity
from .weight_offload import WeightOffload

__all__ = [
    "ActivationBits",
    "ActivationOffload",
    "Checkpointing",
    "ChunkedLoss",
    "CompiledBlocks",
    "FusedUpdate",
    "GradientRelease",
    "Microbatching",
    "Offload",
    "OptimizerState",
    "Precision",
    "Sparsity",
    "Technique",
    "TiledMLP",
    "WeightOffload",
    "register",
    "registered",
]
