"""Triton's interpreter, which has to be chosen before Triton is imported: in another process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_interpreted(file: str, *calls: str) -> None:
    """Call functions of a test's file there; a failure shows what they printed."""
    pytest.importorskip("triton", reason="triton is not installed")
    here = Path(file)
    # From the folder above: a test of a package imports its neighbors from there.
    package = f"{here.parent.name}." if (here.parent / "__init__.py").exists() else ""
    home = here.parent.parent if package else here.parent
    program = f"from {package}{here.stem} import *\n{'; '.join(calls)}; print('equal')"
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(home), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "equal\n", done.stderr
