"""What makes the tests quick without changing what they see."""

import gc
import os
import sys

import pytest

# Tests run beside each other, and threads that wait for a core that another test has spin: the
# training that a test starts as a process took twice as long with two.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_known = 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What was imported is no garbage: each trace and each measurement looked through all of it."""
    global _known
    if len(sys.modules) != _known:
        _known = len(sys.modules)
        gc.collect()
        gc.freeze()
