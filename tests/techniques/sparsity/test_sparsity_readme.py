"""The code in the README runs."""

import re
from pathlib import Path

import shoestring.techniques.sparsity as technique


def test_the_readme_runs() -> None:
    page = (Path(technique.__file__).parent / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
