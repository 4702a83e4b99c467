"""The code in the README runs."""

from __future__ import annotations

import re
from pathlib import Path

from shoestring.techniques import microbatching as technique


def test_the_code_runs():
    page = (Path(technique.__file__).parent / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
