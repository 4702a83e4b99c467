"""Train neural networks in a small, known amount of memory.

`profile` shows where every byte of a training step goes before anything is allocated; `measure`
runs a real step and says what it needed. `plan` finds what fits a budget in bytes, `apply` makes
the step a `Plan` asks for, `fit` does both; `verify` trains by the plan and plainly, and compares.
"""

from .errors import BudgetError, BudgetWarning, NoEffectWarning, ShoestringError
from .memory.live.measure import Measurement, measure
from .memory.model import MemoryProfile
from .planning.fit import fit
from .planning.planner import plan
from .planning.result import BudgetPlan
from .step.apply import apply
from .step.profiling import profile
from .techniques import Checkpointing, Microbatching, Precision, Sparsity
from .techniques.plan import Plan
from .verification.verify import verify
from .version import __version__ as __version__

__all__ = [
    "BudgetError",
    "BudgetPlan",
    "BudgetWarning",
    "Checkpointing",
    "Measurement",
    "MemoryProfile",
    "Microbatching",
    "NoEffectWarning",
    "Plan",
    "Precision",
    "ShoestringError",
    "Sparsity",
    "apply",
    "fit",
    "measure",
    "plan",
    "profile",
    "verify",
]
