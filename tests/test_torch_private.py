"""Private APIs of PyTorch are used in one folder, which says what breaks when they move."""

from __future__ import annotations

import re
from pathlib import Path

import shoestring

SOURCE = Path(shoestring.__file__).parent
PRIVATE = re.compile(r"\btorch(\.\w+)*\._(?!_)|^ *from torch[\w.]* import .*\b_(?!_)")
OPERATIONS = re.compile(r"\btorch\.ops\.")


def test_no_other_file_names_a_private_api():
    found = [
        f"{file.relative_to(SOURCE)}:{number}: {line.strip()}"
        for file in sorted(SOURCE.rglob("*.py"))
        if file.parent.name != "torch_private"
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if PRIVATE.search(line) and not OPERATIONS.search(line)
    ]
    assert not found


def test_every_area_says_what_breaks():
    folder = SOURCE / "torch_private"
    text = (folder / "__init__.py").read_text(encoding="utf-8")
    areas = {file.stem for file in folder.glob("*.py")} - {"__init__"}
    assert areas == set(re.findall(r"^- `(\w+)`", text, re.MULTILINE))
