"""What torchrun's variables mean, and that one process alone is asked nothing."""

from __future__ import annotations

import pytest
import torch

from shoestring.errors import InputError, ShoestringError
from shoestring.step import group


def test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert (group.ranks(), group.rank(), group.launched(), group.is_first()) == (1, 0, 1, True)
    assert group.largest(3) == 3 and group.from_all("x") == ["x"]
    assert group.on_first(lambda: 5) == 5
    assert group.parallel_for(None) is None and group.local_device("cuda") == "cuda"
    with pytest.raises(InputError, match="several processes") as caught:
        group.parallel_for("fsdp")
    assert "torchrun" in str(caught.value.hint)
    with group.process_group(torch.device("cpu")):
        assert group.ranks() == 1


def test_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert group.launched() == 4 and not group.is_first()
    assert group.parallel_for(None) == "ddp" and group.parallel_for("fsdp") == "fsdp"
    assert group.local_device("cuda") == "cuda:1" and group.local_device("cpu") == "cpu"
    assert group.local_device("cuda:0") == "cuda:0"


def test_a_lost_rank_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a group with itself alone, but by way of torchrun's variables."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    asked = iter([2, 1, 1, 1, 2, 1, 1, 1])  # several to begin with, then itself alone
    monkeypatch.setattr(group, "launched", lambda: next(asked))
    cpu = torch.device("cpu")
    lost = RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
    with pytest.raises(ShoestringError, match="another rank ended"), group.process_group(cpu):
        raise lost
    with pytest.raises(RuntimeError, match="shapes differ"), group.process_group(cpu):
        raise RuntimeError("shapes differ")
    assert not torch.distributed.is_initialized()
