"""Train neural networks in a small, known amount of memory.

`profile` shows where every byte of a training step goes before anything is allocated; `measure`
runs a real step and says what it needed. `plan` finds what fits a budget in bytes, `apply` makes
the step a `Plan` asks for, `fit` does both; `verify` trains by the plan and plainly, and compares.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import (
    BudgetError,
    BudgetWarning,
    InputError,
    NoEffectWarning,
    ShoestringError,
    SizeError,
    TraceError,
    TrainingStopped,
    UnknownOperationWarning,
    UnprovenWarning,
    VerificationError,
)
from .version import __version__

if TYPE_CHECKING:
    from .integrations.cards import CardFit, Cards, cards, will_it_fit
    from .integrations.configurations import Configured
    from .integrations.explain import Effect, Explanation, explain
    from .memory.live.measure import Measurement, measure
    from .memory.model import MemoryProfile
    from .memory.prediction import Prediction
    from .memory.timeline import Timeline
    from .planning.fit import fit
    from .planning.planner import plan
    from .planning.prices import Price
    from .planning.result import BudgetPlan, Choice, FrontPoint, Trial
    from .step.apply import apply
    from .step.clipping import Clip
    from .step.profiling import profile
    from .step.shares import Parallel
    from .step.step import Step
    from .techniques import (
        ActivationBits,
        ActivationOffload,
        Checkpointing,
        ChunkedLoss,
        CompiledBlocks,
        FusedUpdate,
        GradientRelease,
        Microbatching,
        Offload,
        OptimizerState,
        Precision,
        Sparsity,
        Technique,
        TiledMLP,
        WeightOffload,
        register,
    )
    from .techniques.claims import Level
    from .techniques.plan import Plan
    from .trace.graph import Role
    from .verification.certificate import Certificate, Comparison
    from .verification.verify import verify

__all__ = [
    "ActivationBits",
    "ActivationOffload",
    "BudgetError",
    "BudgetPlan",
    "BudgetWarning",
    "CardFit",
    "Cards",
    "Certificate",
    "Checkpointing",
    "Choice",
    "ChunkedLoss",
    "Clip",
    "Comparison",
    "CompiledBlocks",
    "Configured",
    "Effect",
    "Explanation",
    "FrontPoint",
    "FusedUpdate",
    "GradientRelease",
    "InputError",
    "Level",
    "Measurement",
    "MemoryProfile",
    "Microbatching",
    "NoEffectWarning",
    "Offload",
    "OptimizerState",
    "Parallel",
    "Plan",
    "Precision",
    "Prediction",
    "Price",
    "Role",
    "ShoestringError",
    "SizeError",
    "Sparsity",
    "Step",
    "Technique",
    "TiledMLP",
    "Timeline",
    "TraceError",
    "TrainingStopped",
    "Trial",
    "UnknownOperationWarning",
    "UnprovenWarning",
    "VerificationError",
    "WeightOffload",
    "__version__",
    "apply",
    "cards",
    "explain",
    "fit",
    "measure",
    "plan",
    "profile",
    "register",
    "verify",
    "will_it_fit",
]

_PLACES = {
    "integrations.cards": ("CardFit", "Cards", "cards", "will_it_fit"),
    "integrations.configurations": ("Configured",),
    "integrations.explain": ("Effect", "Explanation", "explain"),
    "memory.live.measure": ("Measurement", "measure"),
    "memory.model": ("MemoryProfile",),
    "memory.prediction": ("Prediction",),
    "memory.timeline": ("Timeline",),
    "planning.fit": ("fit",),
    "planning.planner": ("plan",),
    "planning.prices": ("Price",),
    "planning.result": ("BudgetPlan", "Choice", "FrontPoint", "Trial"),
    "step.apply": ("apply",),
    "step.clipping": ("Clip",),
    "step.profiling": ("profile",),
    "step.shares": ("Parallel",),
    "step.step": ("Step",),
    "techniques": (
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
    ),
    "techniques.claims": ("Level",),
    "techniques.plan": ("Plan",),
    "trace.graph": ("Role",),
    "verification.certificate": ("Certificate", "Comparison"),
    "verification.verify": ("verify",),
}
"""Module → public names, imported when they are first used: `import shoestring` alone is quick."""
_MODULES = {name: module for module, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
