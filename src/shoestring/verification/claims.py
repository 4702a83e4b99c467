"""The claims of a plan about each result of training, and what breaks a claim."""

from __future__ import annotations

from dataclasses import replace

from ..techniques.claims import MOVED, VALUES, Circumstances, Claim, Claims, Level, weakest
from ..techniques.plan import Plan
from .certificate import Comparison


def claims(plan: Plan, at: Circumstances) -> Claims:
    """The weakest claim of any part, for each thing."""
    made = [claim for technique in plan.techniques for claim in technique.claims(at)]
    if at.device != "cpu":
        why = f"kernels on {at.device} add in any order"
        made.insert(0, Claim(Level.ROUNDING, why, VALUES))
    if weakest(made)["parameters"][0] > Level.EQUAL:
        why = "later steps start from parameters that are not equal"
        made.append(Claim(Level.ROUNDING, why, ("loss", "buffers")))
    found = weakest(made)
    if not at.linear and found["gradients"][0] > Level.EQUAL:
        why = "the optimizer divides by the gradient: zero ± rounding moves"
        found = weakest([*made, Claim(Level.NEAR, why, MOVED)])
    return found


def hidden(plan: Plan, at: Circumstances, made: Claims) -> list[str]:
    """Lossless techniques that need a proof of their own: others' claims would let them pass."""
    names = []
    for technique in plan.techniques:
        own = weakest(technique.claims(replace(at, drawn=False)))["gradients"][0]
        lossless = own <= Level.ROUNDING
        if technique.proof == "without" and lossless and len(plan.techniques) > 1:
            names.append(technique.name)
        weaker = made["gradients"][0] > Level.ROUNDING
        if technique.proof == "alone" and own is Level.ROUNDING and weaker:
            names.append(technique.name)
    return names


def suspicion(broken: Comparison, plan: Plan) -> Comparison:
    """The same with what usually causes it."""
    causes = [t.suspects[broken.what] for t in plan.techniques if broken.what in t.suspects]
    if not causes:
        return replace(broken, why=broken.why or "follows from the above")
    return replace(broken, why=", or ".join(dict.fromkeys(causes)) + "?")
