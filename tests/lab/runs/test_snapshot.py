"""Snapshots as files: what comes back, what is kept, and that nothing in them runs."""

import os

import pytest
import torch

from shoestring.errors import InputError, TrainingStopped
from shoestring.lab.runs import snapshot


def state(value=0.0):
    weight = torch.full((2, 3, 4, 4), value).to(memory_format=torch.channels_last)
    return {"weight": weight, "half": weight[0].half(), "n": {3: (1.5, None)}, "empty": []}


def test_everything_comes_back_with_its_layout(tmp_path):
    path = snapshot.save(tmp_path, 7, state(0.1))
    found = snapshot.load(path)
    assert found["weight"].equal(state(0.1)["weight"])
    assert found["weight"].is_contiguous(memory_format=torch.channels_last)
    assert found["half"].dtype is torch.float16 and found["n"] == {3: (1.5, None)}


def test_two_are_kept_and_the_newest_is_found(tmp_path):
    for step in (1, 5, 20, 100):
        snapshot.save(tmp_path, step, {"step": step})
    assert [int(p.name.split("-")[1]) for p in snapshot.found(tmp_path)] == [20, 100]
    assert snapshot.load_latest(tmp_path) == ({"step": 100}, [])
    assert sorted(os.listdir(tmp_path)) == [p.name for p in snapshot.found(tmp_path)]


def test_no_snapshot_and_other_files(tmp_path):
    (tmp_path / "snapshot-1.pt").write_bytes(b"not ours")
    (tmp_path / ".snapshot.partial").write_bytes(b"half of one")
    assert snapshot.load_latest(tmp_path) == (None, [])
    assert not (tmp_path / ".snapshot.partial").exists()


@pytest.mark.parametrize("place", [0, 0.3, 0.7, -1])
def test_every_flipped_bit_is_noticed(tmp_path, place):
    path = snapshot.save(tmp_path, 1, state())
    data = bytearray(path.read_bytes())
    data[-1 if place == -1 else int(place * len(data))] ^= 4
    path.write_bytes(data)
    with pytest.raises(InputError, match=f"{path.name} is damaged"):
        snapshot.load(path)


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


def test_a_snapshot_runs_nothing(tmp_path):
    path = snapshot.save(tmp_path, 1, {"evil": Evil()})
    with pytest.raises(InputError, match="cannot be read"):
        snapshot.load(path)


def test_a_folder_that_is_gone(tmp_path):
    with pytest.raises(TrainingStopped, match="No such file or directory; there is none before it"):
        snapshot.save(tmp_path / "gone", 1, state())
