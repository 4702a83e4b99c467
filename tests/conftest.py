"""What makes the tests quick and the same in any order, without changing what they see."""

import gc
import os
import random
import sys
from pathlib import Path

import pytest

# Tests run beside each other, and threads that wait for a core that another test has spin: the
# training that a test starts as a process took twice as long with two.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch

_WORKSPACES = ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE")
_GIVEN = {name: os.environ.get(name) for name in _WORKSPACES}
_known = 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What was imported is no garbage: each trace and each measurement looked through all of it."""
    global _known
    if len(sys.modules) != _known:
        _known = len(sys.modules)
        gc.collect()
        gc.freeze()
    # Weights and data that a test draws must not depend on which tests its worker ran before.
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    # A run for CUDA sets these for its process, and predictions of later tests would go by them.
    for name, value in _GIVEN.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


_LISTED = frozenset((Path(__file__).parent / "slow_tier.txt").read_text().splitlines())
"""Single tests and cases that take longest, which `make test` leaves to `make test-all`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is listed is slow, as if it were marked; a name that is no longer there is an error."""
    for item in items:
        if item.nodeid in _LISTED:
            item.add_marker(pytest.mark.slow)
    if not any("::" in given for given in config.args):  # files are collected whole
        names = {item.nodeid for item in items}
        files = {name.partition("::")[0] for name in names}
        gone = [n for n in sorted(_LISTED - names) if n.partition("::")[0] in files]
        if gone:
            raise pytest.UsageError(f"tests/slow_tier.txt lists tests that are not there: {gone}")
