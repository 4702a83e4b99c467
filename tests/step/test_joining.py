"""Ranks that were started by hand, one of which never comes."""

import socket
import subprocess
import sys

import pytest

from shoestring.errors import InputError
from shoestring.step.group import launched, process_group

JOIN = """
import torch
from shoestring.errors import ShoestringError
from shoestring.step.group import process_group, ranks
try:
    with process_group(torch.device("cpu")):
        print("ranks", ranks())
        torch.distributed.barrier()  # who leaves first would end a connection that the other makes
except ShoestringError as error:
    print("refused:", error.message)
"""


def started(rank, port, seconds):
    import os

    given = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    given |= {"MASTER_PORT": str(port), "SHOESTRING_JOIN_SECONDS": str(seconds)}
    return subprocess.Popen(
        [sys.executable, "-c", JOIN], env={**os.environ, **given}, stdout=subprocess.PIPE, text=True
    )


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_comes_is_not_waited_for(rank):
    process = started(rank, free_port(), 3)
    said, _ = process.communicate(timeout=120)
    assert f"refused: rank {rank}: not all 2 ranks started within 3 s" in said


@pytest.mark.slow
def test_two_ranks_that_come_meet():
    port = free_port()
    processes = [started(rank, port, 60) for rank in (0, 1)]
    assert [p.communicate(timeout=120)[0].strip() for p in processes] == ["ranks 2", "ranks 2"]


@pytest.mark.parametrize("size", ["x", "-1", "9" * 50, "2.0"])
def test_what_is_no_number_of_ranks(monkeypatch, size):
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(InputError, match="WORLD_SIZE"):
        launched()


def test_a_rank_without_a_number(monkeypatch):
    import torch

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match="RANK is ''"), process_group(torch.device("cpu")):
        pass
