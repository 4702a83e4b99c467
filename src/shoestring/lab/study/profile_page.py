"""The page of one profile: a step's memory over time, beside the plain step, and by module."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from ... import files
from ...errors import InputError
from ...memory.model import MemoryProfile
from ...techniques.registry import flags
from ...units import format_size
from .page import NOTHING, Section, document, section, timeline_section
from .timelines import as_values


def profile_page(title: str, profile: MemoryProfile, plain: MemoryProfile | None = None) -> str:
    """One page that loads nothing; `plain` is drawn behind the planned step."""
    row = {**NOTHING, "memory": profile.peak_bytes, "profile": 0}
    data: dict[str, Any] = {"title": title, "score_label": "", "varied": [], "heads": {}}
    data |= {"rows": [row], "profiles": [_values(profile)], "curves": {}}
    data["modules"] = _by_module(profile)
    sections = [timeline_section(), _modules()]
    facts = [
        f"{profile.parameters:,} parameters · {profile.accounting} accounting · "
        f"peak {format_size(profile.peak_bytes)}, {profile.peak_phase}"
    ]
    if plain is not None:
        data["behind"] = _values(plain)
        times = plain.peak_bytes / max(profile.peak_bytes, 1)
        facts.append(f"The line is the plain step: peak {format_size(plain.peak_bytes)}, "
                     f"{times:.1f} times as much")  # fmt: skip
    told = "\n".join(f"<p>{escape(fact)}</p>" for fact in facts)
    return document(title, told, sections, data, "modules.js")


def write_profile(
    path: str | Path,
    settings: Mapping[str, Any],
    result: MemoryProfile,
    plain: MemoryProfile | None = None,
) -> None:
    """Write the page of a profile; its title says what was profiled."""
    what = [f"{settings['batch']} {settings['batch_unit']}"]
    named = (*flags(), "optimizer")
    what += [f"{n} {settings[n]}" for n in named if settings.get(n) not in (None, False)]
    text = profile_page(f"{settings['model']}: {', '.join(what)}", result, plain)
    try:
        files.write(path, text.encode(errors="backslashreplace"))
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def _values(profile: MemoryProfile) -> dict[str, Any]:
    made = as_values(profile)
    return {"peak_bytes": made["peak_bytes"], **made["timeline"]}


def _by_module(profile: MemoryProfile) -> dict[str, int]:
    """Live bytes at the peak; what belongs to no module by its role."""
    made: dict[str, int] = {}
    peak = profile.timeline.peak_instant
    for change in profile.timeline.changes:
        if change.instant <= peak:
            name = change.module or f"({change.role.value.replace('_', ' ')})"
            made[name] = made.get(name, 0) + change.nbytes
    return {name: size for name, size in made.items() if size}


def _modules() -> Section:
    return section(
        "tree",
        '<p class="faint">Live bytes at the peak by module, or (in brackets) by role if they are '
        "of no module. A click, a tap or Enter opens a module. Arrow keys walk through the tree, "
        "Escape goes back out.</p>",
        '<div id="modules"></div>',
        '<div class="panel" id="modules-said" aria-live="polite"></div>',
        '<div class="controls"><button type="button" id="modules-out">all modules</button></div>',
        title="Modules at the peak",
    )
