"""Counts of what was tried and what broke, printed at the end."""

import sys
from pathlib import Path

# What tests of the loop, of the command line and of studies share with these.
sys.path += [str(Path(__file__).parents[1] / name) for name in ("lab/runs", "lab/study", "cli")]

import chaos


def pytest_terminal_summary(terminalreporter):
    """One line for each thing that was counted."""
    if chaos.COUNTS:
        terminalreporter.section("chaos: what was tried, and what broke")
        for name, number in sorted(chaos.COUNTS.items()):
            terminalreporter.write_line(f"{number:>9,}  {name}")
