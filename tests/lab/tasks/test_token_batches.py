"""Minibatches of tokens: few shapes, nothing lost, the same from the same seed."""

import itertools

import numpy as np
import pytest
import torch

from shoestring.errors import InputError
from shoestring.lab.tasks.bpe import BEGIN, END, PADDING
from shoestring.lab.tasks.token_batches import (
    AHEAD,
    TextFeed,
    best_lengths,
    by_length,
    target_tokens,
)
from tiny_texts import small_text

CPU = torch.device("cpu")


def feed(tokens=100, seed=0, **others):
    return TextFeed(small_text(), tokens, seed=seed, device=CPU, **others)


def epoch_of(made, epoch=0):
    return [made.batch(epoch, number) for number in range(made.steps_per_epoch)]


def test_an_epoch_has_every_pair_once():
    made = feed()
    seen = [
        tuple(row[row != PADDING].tolist() for row in pair)
        for batch in epoch_of(made)
        for pair in zip(batch["source"], batch["target_out"], strict=True)
    ]
    task = small_text()
    wanted = [(task.train[0][n], task.train[1][n]) for n in range(len(task.train[0]))]
    assert sorted(pair for pair in seen if pair != ([], [])) == sorted(wanted)


def test_shapes_are_few_and_within_the_tokens():
    made = feed(shapes=3)
    shapes = {tuple(batch["source"].shape) for batch in epoch_of(made)}
    assert len(shapes) <= 3
    assert all(rows * length <= 100 for rows, length in shapes)
    assert shapes <= {(shape.rows, shape.length) for shape in made.shapes}
    for batch in epoch_of(made):
        assert len({tuple(tensor.shape) for tensor in batch.values()}) == 1


def test_the_target_is_fed_one_position_later():
    for batch in epoch_of(feed()):
        for fed, asked in zip(batch["target_in"], batch["target_out"], strict=True):
            words = asked[asked != PADDING]
            if len(words) == 0:  # a row that fills up
                assert (fed == PADDING).all()
                continue
            assert words[-1] == END
            assert fed[: len(words)].tolist() == [BEGIN, *words[:-1].tolist()]
            assert (fed[len(words) :] == PADDING).all()
        assert int(target_tokens(batch)) == int((batch["target_out"] != PADDING).sum())


def test_order_depends_on_seed_and_epoch_alone():
    one, other = feed(seed=3), feed(seed=3)
    list(epoch_of(other, 0))  # going through an epoch first changes nothing
    assert one.batch(5, 2)["source"].equal(other.batch(5, 2)["source"])
    first = [b["source"].tolist() for b in epoch_of(one, 0)]
    assert first != [b["source"].tolist() for b in epoch_of(one, 1)]
    assert first != [b["source"].tolist() for b in epoch_of(feed(seed=4), 0)]


def test_a_training_begins_with_large_batches():
    made = feed(shapes=3)
    largest = tuple(made.sample()["source"].shape)
    first, second = (
        [tuple(batch["source"].shape) for batch in epoch_of(made, epoch)] for epoch in (0, 1)
    )
    ahead = min(AHEAD, first.count(largest))
    assert ahead > 0 and first[:ahead] == [largest] * ahead
    assert sorted(first) == sorted(second)
    orders = [[tuple(b["source"].shape) for b in epoch_of(made, e)] for e in range(1, 6)]
    assert any(shapes[0] != largest for shapes in orders)  # drawn, after the first


def test_lengths_are_the_best_there_are():
    """Against trying all choices."""
    draw = np.random.default_rng(0)
    for shapes in (1, 2, 3):
        lengths = draw.integers(2, 12, 60)
        values = sorted(set(lengths.tolist()))

        def cost(chosen, lengths=lengths):
            ends = np.array(chosen)
            return sum(1 / (48 // ends[np.searchsorted(ends, n)]) for n in lengths)

        best = min(
            cost((*some, values[-1]))
            for count in range(shapes)
            for some in itertools.combinations(values[:-1], count)
        )
        assert cost(best_lengths(lengths, 48, shapes)) == pytest.approx(best)


def test_a_batch_must_hold_the_longest_sentence():
    with pytest.raises(InputError, match="a batch of 5 tokens cannot hold a sentence of"):
        feed(tokens=5)


def test_held_out_sentences_are_all_there():
    made = feed()
    rows = [row[row != PADDING].tolist() for b in made.held_out(40) for row in b["target_out"]]
    target = small_text().valid[1]
    assert sorted(rows) == sorted(target[n] for n in range(len(target)))


def test_by_length_takes_long_ones_alone():
    made = by_length(np.array([3, 50, 4, 3]), 12)
    assert [(shape.rows, shape.length, chosen.tolist()) for shape, chosen in made] == [
        (3, 4, [0, 3, 2]),
        (1, 50, [1]),
    ]


def test_the_sample_is_as_large_as_any():
    made = feed()
    sample = made.sample()
    assert sample["source"].shape in {torch.Size([s.rows, s.length]) for s in made.shapes}
    assert not (sample["target_out"] == PADDING).any()
    part = made.sample(25)["source"]
    assert 25 // part.shape[1] * 2 == len(part)
