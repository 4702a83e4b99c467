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


def test_as_many_weights_are_kept_as_are_averaged(tmp_path):
    for step in range(1, 15):
        snapshot.save(tmp_path, step, {"step": step}, kind="weights", keep=10)
        held = [int(p.name.split("-")[1]) for p in snapshot.found(tmp_path, "weights")]
        assert held == list(range(max(1, step - 9), step + 1))


def test_no_snapshot_and_other_files(tmp_path):
    (tmp_path / "snapshot-1.pt").write_bytes(b"not ours")
    (tmp_path / ".snapshot.partial").write_bytes(b"half of one")
    assert snapshot.load_latest(tmp_path) == (None, [])
    assert not (tmp_path / ".snapshot.partial").exists()


def test_a_third_one_that_a_crash_left_goes_when_the_run_goes_on(tmp_path):
    """It ended between the rename of the newest and the removal of the oldest."""
    run, aside = tmp_path / "run", tmp_path / "aside"
    for folder in (run, aside):
        folder.mkdir()
    oldest = snapshot.save(aside, 1, {"step": 1})
    for step in (5, 20):
        snapshot.save(run, step, {"step": step})
    oldest.rename(run / oldest.name)
    assert len(snapshot.found(run)) == 3
    assert snapshot.load_latest(run, held=False) == ({"step": 20}, [])
    assert len(snapshot.found(run)) == 3  # another process holds the folder
    assert snapshot.load_latest(run) == ({"step": 20}, [])
    assert [int(p.name.split("-")[1]) for p in snapshot.found(run)] == [5, 20]


def test_a_link_in_place_of_a_half_written_snapshot_is_not_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    run = tmp_path / "run"
    run.mkdir()
    (run / ".snapshot.partial").symlink_to(victim)
    assert not snapshot.save(run, 1, state()).is_symlink()
    assert victim.read_bytes() == b"precious"
    name = snapshot.save(run, 2, state()).name  # its temporary name, guessed
    (run / name).unlink()
    monkeypatch.setattr("secrets.token_hex", lambda count: "0" * 2 * count)
    (run / f".{name}.00000000.partial").symlink_to(victim)
    with pytest.raises(TrainingStopped, match="File exists"):
        snapshot.save(run, 2, state())
    assert victim.read_bytes() == b"precious"


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
