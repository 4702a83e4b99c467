"""Run a tutorial cell by cell: JSON with the words, code, output and pictures of each cell.

`python cells.py SCRIPT`, in a folder for the pictures. A process of its own, because a tutorial
may register techniques.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any


def cells(path: Path) -> list[dict[str, Any]]:
    """The cells between `# %%` marks, each code cell with what it printed and drew."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    found, drawn = [], set()
    for cell in re.split(r"^# %%", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        head, _, body = cell.partition("\n")
        if "[markdown]" in head:
            found.append({"words": re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE)})
        elif body.strip():
            printed = StringIO()
            with redirect_stdout(printed):
                exec(compile(body, str(path), "exec"), namespace)
            pictures = {p.name: p.read_text() for p in Path().glob("*.svg") if p.name not in drawn}
            drawn.update(pictures)
            found.append(
                {"code": body.strip(), "printed": printed.getvalue(), "pictures": pictures}
            )
    return found


if __name__ == "__main__":
    print(json.dumps(cells(Path(sys.argv[1]))))
