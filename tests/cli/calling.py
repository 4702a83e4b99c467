"""`shoestring …` within this process: what it prints, how it ends, and what it wrote."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Called:
    """How a call ended."""

    status: int
    out: str
    err: str
    raised: str | None
    """A traceback, where there should never be one."""

    @property
    def refused(self) -> bool:
        """In one line, with a hint or without, and status 2."""
        return self.status == 2 and self.raised is None and "Traceback" not in self.err


def call(*arguments: object) -> Called:
    """Run the command line as `python -m shoestring` does."""
    from shoestring.cli.main import main

    out, err, raised, status = io.StringIO(), io.StringIO(), None, 0
    before, sys.argv = sys.argv, ["shoestring", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        status, raised = 1, traceback.format_exc()
    finally:
        sys.argv = before
    return Called(status, out.getvalue(), err.getvalue(), raised)


def listed(*folders: Path) -> dict[str, object]:
    """Everything below some folders: kind, size, time and target of each."""
    found: dict[str, object] = {}
    for folder in folders:
        for where, names, files in os.walk(folder):
            for name in (*names, *files):
                path = os.path.join(where, name)
                if "__pycache__" in path:
                    continue
                held = os.lstat(path)
                link = os.readlink(path) if os.path.islink(path) else None
                size = None if os.path.isdir(path) else held.st_size
                stamp = None if os.path.isdir(path) else held.st_mtime_ns
                found[path] = (held.st_mode, size, stamp, link)
    return found
