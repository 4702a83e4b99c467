"""Feeding images: every crop and flip against the obvious way, and order from (seed, epoch)."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from interpreter import run_interpreted
from shoestring.errors import InputError
from shoestring.lab.tasks import images as module
from shoestring.lab.tasks.images import ImageFeed, ImageTask

CPU = torch.device("cpu")


def task(images=30, side=6, padding=2, flip=True):
    """Images with no two pixels alike, so that a crop shows where it came from."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(1, 256, (images + 5, 3, side, side + 1), generator=generator)
    labels = torch.arange(images + 5) % 10
    return ImageTask(
        name="made up",
        split="test",
        images=pixels[:images].to(torch.uint8),
        labels=labels[:images],
        held_out_images=pixels[images:].to(torch.uint8),
        held_out_labels=labels[images:],
        classes=10,
        mean=(0.1, 0.2, 0.3),
        deviation=(0.5, 0.25, 0.2),
        padding=padding,
        flip=flip,
    )


def normalized(image, of):
    """As numpy does it, in 64 bits."""
    mean, deviation = (np.array(x).reshape(3, 1, 1) for x in (of.mean, of.deviation))
    return (image / 255 - mean) / deviation


def variants(image, of):
    """Every crop of the padded image, plain and mirrored, cut one by one."""
    p = of.padding
    height, width = image.shape[1:]
    padded = np.zeros((3, height + 2 * p, width + 2 * p))
    padded[:, p : p + height, p : p + width] = image
    for mirrored in (False, True) if of.flip else (False,):
        for row in range(2 * p + 1):
            for column in range(2 * p + 1):
                crop = padded[:, row : row + height, column : column + width]
                yield (
                    (row, column, mirrored),
                    normalized(crop[:, :, ::-1] if mirrored else crop, of),
                )


@pytest.mark.parametrize("flip", [True, False])
def test_every_image_is_a_crop_of_its_own(flip):
    of = task(padding=1, flip=flip)
    feed = ImageFeed(of, 10, seed=3, device=CPU)
    seen = Counter()
    for epoch in range(10):
        used = []
        for number in range(feed.steps_per_epoch):
            images, labels = feed.batch(epoch, number)
            for image, label in zip(images.double().numpy(), labels.tolist(), strict=True):
                found = [
                    (index, key)
                    for index in range(label, len(of.images), 10)
                    for key, crop in variants(of.images[index].numpy(), of)
                    if np.allclose(image, crop, atol=1e-5)
                ]
                assert len(found) == 1
                used.append(found[0][0])
                seen[found[0][1]] += 1
        assert sorted(used) == list(range(30))  # each image once an epoch
    kinds = 9 * (2 if flip else 1)
    assert len(seen) == kinds  # 300 draws: each of 18 is missed with probability 4e-8
    assert max(seen.values()) < 3 * 300 / kinds


def test_a_batch_depends_on_nothing_but_seed_epoch_and_number():
    of = task()
    one, other = ImageFeed(of, 7, seed=5, device=CPU), ImageFeed(of, 7, seed=5, device=CPU)
    later = other.batch(3, 2)
    torch.manual_seed(99)
    for number in range(4):
        one.batch(0, number)
    state = torch.get_rng_state()
    again = one.batch(3, 2)
    assert all(a.equal(b) for a, b in zip(later, again, strict=True))
    assert torch.get_rng_state().equal(state)
    assert not ImageFeed(of, 7, seed=6, device=CPU).batch(3, 2)[0].equal(later[0])
    assert not one.batch(4, 2)[0].equal(later[0])


def test_all_batches_have_the_same_shape():
    feed = ImageFeed(task(), 7, seed=0, device=CPU)
    assert feed.steps_per_epoch == 4
    assert {tuple(feed.batch(0, n)[0].shape) for n in range(4)} == {(7, 3, 6, 7)}


def test_types_and_layout_are_as_asked():
    of = task()
    wide = ImageFeed(of, 8, seed=1, device=CPU).batch(0, 0)[0]
    feed = ImageFeed(of, 8, seed=1, device=CPU, dtype=torch.float16, channels_last=True)
    images, labels = feed.batch(0, 0)
    assert images.dtype is torch.float16 and labels.dtype is torch.int64
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert images.equal(wide.half())  # rounded once, after the normalization


def test_held_out_images_come_whole_and_in_order():
    of = task()
    feed = ImageFeed(of, 8, seed=1, device=CPU)
    parts = list(feed.held_out(2))
    assert [len(labels) for _, labels in parts] == [2, 2, 1]
    expected = np.stack([normalized(i.numpy(), of) for i in of.held_out_images])
    np.testing.assert_allclose(torch.cat([i for i, _ in parts]).numpy(), expected, atol=1e-5)
    assert torch.cat([labels for _, labels in parts]).equal(of.held_out_labels)


def test_a_validation_split_is_drawn_by_the_seed():
    of = task()
    split = of.with_validation(6, seed=1)
    assert split.split == "validation"
    assert len(split.images) == 24 and len(split.held_out_images) == 6
    rows = [tuple(i.flatten().tolist()) for i in (*split.images, *split.held_out_images)]
    assert sorted(rows) == sorted(tuple(i.flatten().tolist()) for i in of.images)
    assert split.images.equal(of.with_validation(6, seed=1).images)
    assert not split.held_out_images.equal(of.with_validation(6, seed=2).held_out_images)


def test_a_batch_larger_than_the_data():
    with pytest.raises(InputError, match="a batch of 31 from 30 training images"):
        ImageFeed(task(), 31, seed=0, device=CPU)


@pytest.mark.parametrize("channels_last", [False, True])
def test_in_place_every_batch_lies_where_the_last_one_did(channels_last):
    settings = {"seed": 1, "device": CPU, "dtype": torch.float16, "channels_last": channels_last}
    plain, feed = ImageFeed(task(), 8, **settings), ImageFeed(task(), 8, **settings, in_place=True)
    first = feed.batch(0, 0)
    for epoch, number in ((0, 1), (1, 0), (0, 2)):
        again = feed.batch(epoch, number)
        assert all(a is b for a, b in zip(first, again, strict=True))
        assert all(a.equal(b) for a, b in zip(again, plain.batch(epoch, number), strict=True))


def compare_kernels(few=False):
    """Crops by Triton's kernel against PyTorch's functions, on the CPU."""
    paddings = (1,) if few else (0, 1, 4)
    cases = itertools.product(paddings, (True, False), (True, False))
    for number, (padding, flip, channels_last) in enumerate(cases):
        of = task(padding=padding, flip=flip)
        for dtype in (torch.float32, torch.float16):
            settings = {"seed": number, "device": CPU, "channels_last": channels_last}
            module.DEVICES = ()
            plain = ImageFeed(of, 7, dtype=dtype, **settings)
            module.DEVICES = ("cpu",)
            feed = ImageFeed(of, 7, dtype=dtype, **settings)
            wanted = [plain.batch(epoch, 1) for epoch in range(3)]
            found = [feed.batch(epoch, 1) for epoch in range(3)]
            assert feed._kernels is not None and plain._kernels is None
            for (images, labels), (expected, chosen) in zip(found, wanted, strict=True):
                assert labels.equal(chosen) and images.stride() == expected.stride()
                torch.testing.assert_close(images, expected)


@pytest.mark.slow
def test_the_kernel_makes_the_same_crops():
    run_interpreted(__file__, "compare_kernels()")


def test_where_triton_cannot_compile_pytorch_makes_them():
    class Broken:
        def crop(self, *_, **__):
            raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    plain, feed = ImageFeed(task(), 8, seed=1, device=CPU), ImageFeed(task(), 8, seed=1, device=CPU)
    feed._kernels = Broken()
    with pytest.warns(RuntimeWarning, match=r"\(Failed to find C compiler\.\)"):
        first = feed.batch(0, 0)
    assert first[0].equal(plain.batch(0, 0)[0])
    assert feed.batch(0, 1)[0].equal(plain.batch(0, 1)[0])  # without a word


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu_and_streamed_there_it_is_the_same_batch():
    of = replace(task(), padding=1)
    device = torch.device("cuda")
    expected = ImageFeed(of, 8, seed=1, device=CPU)
    held = ImageFeed(of, 8, seed=1, device=device)
    streamed = ImageFeed(of, 8, seed=1, device=device, device_limit_bytes=0)
    assert streamed.streams and streamed.resident_bytes == 0
    assert held.resident_bytes >= of.data_bytes
    for epoch in range(2):
        for number in range(3):
            images, labels = expected.batch(epoch, number)
            for feed in (held, streamed):
                there = feed.batch(epoch, number)
                assert there[0].is_cuda and there[1].cpu().equal(labels)
                torch.testing.assert_close(there[0].cpu(), images)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_batch_is_made_in_its_own_memory():
    feed = ImageFeed(
        task(200, side=32), 100, seed=0, device=torch.device("cuda"), dtype=torch.float16
    )
    feed.batch(0, 0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    images, _ = feed.batch(0, 1)
    assert torch.cuda.max_memory_allocated() - before < images.nbytes + 20_000
