"""The rows of `strangers.py` as a table, and where they come from."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from stranger_models import KINDS

PACKAGES = ("torch", "transformers", "torch-geometric", "scipy", "numpy")
GOOD = ("ok", "ok, unchecked")


def provenance(device: str, scale: int) -> dict[str, Any]:
    """What made the rows: the command, when, where, and which versions."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    revision = subprocess.run(asked, capture_output=True, text=True, check=False)
    return {
        "command": "python " + " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"CPU {_processor()}",
        "revision": revision.stdout.strip() or "unknown",
        "scale": scale,
        "versions": versions,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")


def line(row: dict[str, Any]) -> str:
    """Of the long table; sizes in MB (10^6 bytes)."""
    measured = row.get("measured_bytes")
    found = row.get("truth")
    shown = "-" if measured is None else f"{measured / 1e6:.3f}"
    error = "-" if found is None else f"{found['error']:.0e}"
    says = {True: "ok", False: "FAILS", None: "-"}[row.get("verified")]
    note = row.get("short") or row.get("untraced") or row.get("failed") or row.get("refused", "")
    return (
        f"{row['name']:<22}{row['fraction']:>5.0%}{row['plain_bytes'] / 1e6:>9.3f}"
        f"{row['budget_bytes'] / 1e6:>9.3f}{shown:>9}  {row.get('kind', '-'):<14}{error:>7}  "
        f"{says:<6}{row['verdict']:<18}{note[:90]}"
    )


def is_wrong(verdict: str) -> bool:
    """A verdict has a word in capitals where something is wrong."""
    return any(word.isupper() for word in verdict.split())


def summary(rows: list[dict[str, Any]]) -> str:
    """The short table: verdicts by budget, what is wrong by name, and the kinds."""
    fractions = sorted({row["fraction"] for row in rows}, reverse=True)
    counts = Counter((row["verdict"], row["fraction"]) for row in rows)
    verdicts = sorted({row["verdict"] for row in rows}, key=lambda v: (is_wrong(v), v))
    head = "".join(f"{fraction:>7.0%}" for fraction in fractions)
    lines = [f"{'budget':<22}{head}{'all':>7}"]
    for verdict in verdicts:
        each = [counts[verdict, fraction] for fraction in fractions]
        lines.append(f"{verdict:<22}" + "".join(f"{n:>7}" for n in each) + f"{sum(each):>7}")
    planned = [row for row in rows if row.get("measured_bytes") is not None]
    lossless = [row for row in planned if row["kind"] == "lossless"]
    right = [row for row in lossless if row.get("truth") and row["truth"]["right"]]
    unchecked = sum(row.get("truth") is None for row in lossless)
    by_running = sum(bool(row.get("by_running")) for row in planned)
    names = {row["name"] for row in rows}
    lines += [
        f"{len(names)} models, {len(rows)} budgets, {len(planned)} plans ({by_running} of models "
        f"that cannot be traced, by running them)",
        f"budget held at the allocator: {sum(row['holds'] for row in planned)} of {len(planned)}",
        f"plans called lossless: {len(lossless)}; right by the loop: {len(right)}; "
        f"the loop cannot check: {unchecked}; wrong: {len(lossless) - len(right) - unchecked}",
        f"certificates: {sum(bool(row.get('verified')) for row in planned)} passed of "
        f"{len(planned)}; false: {_count(rows, 'FALSE CERTIFICATE')}; "
        f"false alarms: {_count(rows, 'FALSE ALARM')}",
        _kinds(rows),
    ]
    lines += [
        f"  {r['name']} at {r['fraction']:.0%}: {r['verdict']}"
        for r in rows
        if is_wrong(r["verdict"])
    ]
    return "\n".join(lines)


def _count(rows: Iterable[dict[str, Any]], verdict: str) -> int:
    return sum(row["verdict"] == verdict for row in rows)


def _kinds(rows: list[dict[str, Any]]) -> str:
    """How many of the kinds that failed once are planned and verified now."""
    good = {row["name"] for row in rows if row["verdict"] in GOOD}
    seen = {row["name"] for row in rows}
    done = [kind for kind, name in KINDS.items() if name in good]
    rest = [f"{kind} ({name})" for kind, name in KINDS.items() if name in seen - good]
    absent = sum(name not in seen for name in KINDS.values())
    text = f"kinds planned and verified: {len(done)} of {len(KINDS)}"
    text += f"; not: {', '.join(rest)}" if rest else ""
    return text + (f"; not tried: {absent}" if absent else "")


def read(paths: Iterable[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Where rows of files come from, and the rows; of one model and budget the last counts."""
    origins: list[dict[str, Any]] = []
    rows: dict[Any, dict[str, Any]] = {}
    for path in paths:
        for text in Path(path).read_text().splitlines():
            row = json.loads(text)
            if "provenance" in row:
                origins.append(row["provenance"])
            else:
                rows[row["name"], row["fraction"]] = row
    return origins, list(rows.values())
