"""The digits that come with scikit-learn."""

import pytest
import torch
from sklearn.datasets import load_digits

from shoestring.errors import InputError
from shoestring.lab.tasks import load_task


def test_images_are_those_of_scikit_learn():
    task = load_task("digits")
    data = load_digits()
    assert (len(task.images), len(task.held_out_images)) == (1438, 359)
    assert task.images.shape[1:] == (3, 32, 32) and task.images.dtype is torch.uint8
    shown = task.images[0, 1, ::4, ::4]
    assert shown.equal((torch.from_numpy(data.images[0]) * 255 / 16).round().to(torch.uint8))
    assert task.images[0, 0].equal(task.images[0, 2])
    assert task.held_out_labels.tolist() == data.target[4::5].tolist()
    assert task.labels.unique().tolist() == list(range(10))
    pixels = task.images.double() / 255
    assert task.mean == pytest.approx([float(pixels.mean())] * 3)
    assert task.deviation == pytest.approx([float(pixels.std())] * 3, rel=1e-3)


def test_validation_comes_from_the_training_images_alone():
    whole, split = load_task("digits"), load_task("digits", split="validation", seed=2)
    assert (len(split.images), len(split.held_out_images)) == (1294, 144)
    known = {bytes(i.numpy()) for i in whole.images}
    assert all(bytes(i.numpy()) in known for i in split.held_out_images)
    assert not split.labels.equal(load_task("digits", split="validation", seed=3).labels)


def test_unknown_names():
    with pytest.raises(InputError, match="no data is called 'cifar'") as error:
        load_task("cifar")
    assert "cifar10" in error.value.hint
    with pytest.raises(InputError, match="unknown split 'train'"):
        load_task("digits", split="train")
