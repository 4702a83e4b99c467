"""The next command to try, said on stderr where a person looks at it."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Any

_NOT_REAL = ("hf:", "timm:")
"""Models from a configuration have no weights to train."""


def command(verb: str, model: str, **options: Any) -> str:
    """A command line that can be pasted; options that are None or empty are left out."""
    words = ["shoestring", verb, model]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        for one in value if isinstance(value, list) else [value]:
            if one is not None:
                words += [flag, str(one)]
    return shlex.join(words)


def say(text: str) -> None:
    """On stderr, and only on a terminal: scripts and logs get what they asked for."""
    if sys.stderr.isatty():
        dim, normal = ("\033[2m", "\033[0m") if "NO_COLOR" not in os.environ else ("", "")
        print(f"{dim}next: {text}{normal}", file=sys.stderr)


def after_profile(model: str, peak_bytes: int, accounting: str, **options: Any) -> str:
    """Plan for half of it."""
    half = f"{peak_bytes / 2e6:.3g} MB" if peak_bytes < 2e9 else f"{peak_bytes / 2e9:.3g} GB"
    return command("plan", model, budget=half, accounting=accounting, **options)


def after_plan(model: str, file: str | None, **options: Any) -> str:
    """Verify the plan's file, or keep the plan."""
    if file is None:
        return "add -o plan.toml to keep the plan"
    if model.startswith(_NOT_REAL):
        return f'ss.apply(ss.Plan.load("{file}"), model, optimizer, loss=loss)'
    return command("verify", model, plan=file, **options)


def after_verify(file: str | None) -> str:
    """Train with it."""
    plan = f'ss.Plan.load("{file}")' if file is not None else "plan"
    return f"ss.apply({plan}, model, optimizer, loss=loss) in your own loop"
