"""CIFAR-10's two layouts, where they may lie, and what is said when they are damaged."""

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from shoestring.errors import InputError
from shoestring.lab.tasks import load_task
from shoestring.lab.tasks.cifar10 import (
    BINARY_FILE_BYTES,
    DEVIATION,
    IMAGES_PER_FILE,
    MEAN,
    TEST_FILE,
    TRAIN_FILES,
    VARIABLE,
)
from shoestring.lab.tasks.plain_pickle import load_arrays

FILES = (*TRAIN_FILES, TEST_FILE)


def made_up(name):
    """Labels and pixels of a file, other ones for each."""
    generator = np.random.default_rng(FILES.index(name))
    labels = generator.integers(0, 10, IMAGES_PER_FILE, dtype=np.uint8)
    return labels, generator.integers(0, 256, (IMAGES_PER_FILE, 3072), dtype=np.uint8)


@pytest.fixture(scope="module")
def binary(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "cifar-10-batches-bin"
    folder.mkdir()
    for name in FILES:
        labels, pixels = made_up(name)
        np.concatenate([labels[:, None], pixels], 1).tofile(folder / f"{name}.bin")
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """As torchvision leaves it, written with the protocol of the original files."""
    folder = tmp_path_factory.mktemp("data") / "cifar-10-batches-py"
    folder.mkdir()
    for name in FILES:
        labels, pixels = made_up(name)
        batch = {b"batch_label": b"of five", b"labels": labels.tolist(), b"data": pixels}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return folder


@pytest.fixture
def copy(binary, tmp_path):
    """A folder to damage, of links to the files."""
    for path in binary.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


@pytest.mark.slow
def test_both_layouts_hold_the_same_images(binary, python):
    one, other = load_task("cifar10", folder=binary), load_task("cifar10", folder=python.parent)
    for field in ("images", "labels", "held_out_images", "held_out_labels"):
        assert getattr(one, field).equal(getattr(other, field))
    labels, pixels = made_up("data_batch_3")
    assert one.images.shape == (50_000, 3, 32, 32) and one.images.dtype is torch.uint8
    assert one.images[20_007, 1, 2, 3] == pixels[7, 1024 + 2 * 32 + 3]  # planes, then rows
    assert one.labels[20_000:30_000].equal(torch.from_numpy(labels.astype(np.int64)))
    assert one.held_out_images.shape == (10_000, 3, 32, 32)


def test_the_folder_above_and_the_variable_work_too(binary, tmp_path, monkeypatch):
    (tmp_path / "cifar10").symlink_to(binary.parent)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    task = load_task("cifar10", split="validation", seed=1)
    assert (len(task.images), len(task.held_out_images)) == (45_000, 5_000)


def test_no_folder_and_an_empty_one(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(InputError, match="needs the folder") as error:
        load_task("cifar10")
    assert "--data-dir" in error.value.hint and "cifar-10-binary.tar.gz" in error.value.hint
    with pytest.raises(InputError, match=r"no CIFAR-10 in .*30,730,000 bytes"):
        load_task("cifar10", folder=tmp_path)


def test_a_missing_file_is_named_with_its_size(copy):
    (copy / "data_batch_4.bin").unlink()
    with pytest.raises(InputError, match=r"data_batch_4\.bin is missing \(30,730,000 bytes\)"):
        load_task("cifar10", folder=copy)


@pytest.mark.parametrize("size", [0, 17, BINARY_FILE_BYTES - 1, BINARY_FILE_BYTES + 1])
def test_a_truncated_file_is_named_with_both_sizes(copy, size):
    path = copy / "test_batch.bin"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes((data + b"\0")[:size])
    said = rf"test_batch\.bin is damaged: {size:,} bytes in place of 30,730,000"
    with pytest.raises(InputError, match=said):
        load_task("cifar10", folder=copy)


def test_a_label_that_cannot_be(copy):
    path = copy / "data_batch_1.bin"
    data = bytearray(path.read_bytes())
    data[3073 * 5] = 10
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"data_batch_1\.bin is damaged: a label outside"):
        load_task("cifar10", folder=copy)


@pytest.mark.parametrize("labels", [["cat"] * IMAGES_PER_FILE, [None] * IMAGES_PER_FILE, [1, 2]])
def test_labels_that_are_no_numbers(python, tmp_path, labels):
    for path in python.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "data_batch_1").unlink()
    batch = {b"labels": labels, b"data": np.zeros((IMAGES_PER_FILE, 3072), np.uint8)}
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(InputError, match=r"data_batch_1 is damaged: \S+.* labels, not"):
        load_task("cifar10", folder=tmp_path)


def test_what_cannot_be_read(copy):
    (copy / "data_batch_2.bin").unlink()
    (copy / "data_batch_2.bin").mkdir()
    with pytest.raises(InputError, match=r"cannot read .*data_batch_2\.bin"):
        load_task("cifar10", folder=copy)


class Evil:
    def __reduce__(self):
        return os.system, ("echo owned > owned",)


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (pickle.dumps(Evil()), "system"),
        (pickle.dumps({b"data": np.zeros((3, 3), np.uint8), b"labels": [1]}), "uint8 (3, 3)"),
        (pickle.dumps({b"data": np.array([Path()], object), b"labels": [1]}), "an array of 'O8'"),
        (pickle.dumps([1, 2]), "damaged"),
        (b"\x80\x02}q\x00", "damaged"),
        (b"", "damaged"),
    ],
)
def test_a_pickle_runs_nothing(python, tmp_path, payload, said, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in python.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "data_batch_1").unlink()
    (tmp_path / "data_batch_1").write_bytes(payload)
    with pytest.raises(InputError, match=re.escape(said)) as error:
        load_task("cifar10", folder=tmp_path)
    assert "data_batch_1 is damaged" in error.value.message
    assert not (tmp_path / "owned").exists()


class ObjectKind:
    """A type of objects that says it may be filled with bytes."""

    def __reduce__(self):
        return np.dtype, ("O8", False, True), (3, "|", None, None, None, -1, -1, 1)


class Pointers:
    """Bytes that NumPy would take for pointers to objects."""

    def __reduce__(self):
        made = (np.ndarray, (0,), b"b")
        state = (1, (IMAGES_PER_FILE,), ObjectKind(), False, b"A" * 8 * IMAGES_PER_FILE)
        return np._core.multiarray._reconstruct, made, state


def test_bytes_do_not_become_pointers(tmp_path):
    """In a process of its own, which NumPy's own unpickling ends with a segmentation fault."""
    pixels = np.zeros((IMAGES_PER_FILE, 3072), np.uint8)
    batch = {b"data": pixels, b"labels": Pointers()}
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(batch, protocol=2))
    load = f"load_task('cifar10', folder={str(tmp_path)!r})"
    run = f"from shoestring.lab.tasks import load_task; {load}"
    found = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=60)
    assert found.returncode == 1, found.stderr
    assert "data_batch_1 is damaged" in found.stderr and "an array of 'O8'" in found.stderr


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_arrays_of_whole_numbers_come_through(protocol):
    labels = np.arange(10, dtype=">i4")
    square = np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3))
    found = load_arrays(pickle.dumps({"a": labels, "b": square, "c": [1, 2]}, protocol))
    found = {name.decode() if isinstance(name, bytes) else name: v for name, v in found.items()}
    assert found["a"].tolist() == labels.tolist() and found["b"].tolist() == square.tolist()
    assert found["c"] == [1, 2] and found["b"].dtype == np.uint8


def test_a_pickle_cannot_change_what_reads_it():
    """BUILD and SETITEM on the names it is given, and a memo that would fill the memory."""
    attacks = [
        b"cnumpy\nndarray\n}(Vx\nI1\nub.",
        b"c_codecs\nencode\n(N}(V__call__\nI1\nutb.",
        b"cnumpy\ndtype\n(N}(V__slots__\nI1\nutb.",
    ]
    for attack in attacks:
        with pytest.raises(Exception, match=r"."):
            load_arrays(attack)
    assert load_arrays(b"}r\xff\xff\xff\x7f.") == {}  # LONG_BINPUT: the 2^31st place


@pytest.mark.data
@pytest.mark.skipif(not os.environ.get(VARIABLE), reason=f"{VARIABLE} names no folder")
def test_the_real_images():
    """Counts by class, and the numbers they are normalized with."""
    task = load_task("cifar10")
    assert task.labels.bincount().tolist() == [5000] * 10
    assert task.held_out_labels.bincount().tolist() == [1000] * 10
    assert task.labels[:5].tolist() == [6, 9, 9, 4, 1]  # frog, trucks, deer, car
    for channel in range(3):
        pixels = task.images[:, channel].double() / 255
        assert float(pixels.mean()) == pytest.approx(MEAN[channel], abs=1e-4)
        assert float(pixels.std()) == pytest.approx(DEVIATION[channel], abs=1e-4)
