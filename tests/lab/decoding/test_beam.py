"""Beam search against the sum over everything, and the cached decoder against the whole model."""

import itertools

import pytest
import torch

from shoestring import Plan, Precision, Sparsity, apply
from shoestring.lab.decoding.beam import BeamSearch, translate, translate_batch
from shoestring.lab.decoding.incremental import Incremental
from shoestring.lab.models import sentence_loss
from shoestring.lab.models.dynamic_conv import PADDING, dc_transformer
from shoestring.lab.tasks.bpe import BEGIN, END

WORDS = 3  # beside the four special pieces


def tiny_model(seed=0, words=WORDS, **others):
    torch.manual_seed(seed)
    sizes = {"width": 8, "encoder_layers": 1, "decoder_layers": 2, "heads": 2, **others}
    model = dc_transformer(source_vocabulary=12, target_vocabulary=4 + words, **sizes)
    with torch.no_grad():  # far from uniform, so that hypotheses differ
        model.decoder.output.weight.mul_(4)
    return model.eval()


def sentences(count=5, longest=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    made = torch.full((count, longest), PADDING)
    for row in range(count):
        length = int(torch.randint(1, longest, (), generator=generator))
        made[row, :length] = torch.randint(4, 12, (length,), generator=generator)
        made[row, length] = END
    return made


class Whole:
    """The decoder without caches: the whole model on whole prefixes, in the same clothes."""

    def __init__(self, model, source, hypotheses):
        self.model, self.source = model, source
        self.prefixes = torch.empty(len(source), hypotheses, 0, dtype=torch.int64)

    def step(self, tokens):
        self.prefixes = torch.cat([self.prefixes, tokens[:, :, None]], 2)
        count = self.prefixes.shape[1]
        scores = self.model(self.source.repeat_interleave(count, 0), self.prefixes.flatten(0, 1))
        return scores[:, -1].float().log_softmax(-1).unflatten(0, (-1, count))

    def follow(self, parents):
        index = parents[:, :, None].expand(-1, -1, self.prefixes.shape[2])
        self.prefixes = self.prefixes.gather(1, index)

    def keep(self, left):
        self.source, self.prefixes = self.source[left], self.prefixes[left]


class Short(BeamSearch):
    """Translations of at most four pieces, so that all can be tried."""

    def limit(self, source_length):
        return 4


@torch.no_grad()
def exhaustive(model, source, penalty):
    """The best of all translations, each scored by itself."""
    words = [w for w in range(4 + WORDS) if w not in (BEGIN, PADDING, END)]
    best = (None, -float("inf"))
    for length in range(4):
        for chosen in itertools.product(words, repeat=length):
            whole = [*chosen, END]
            log_p = model(source[None], torch.tensor([[BEGIN, *chosen]]))[0].log_softmax(-1)
            score = float(log_p[torch.arange(len(whole)), whole].sum()) / len(whole) ** penalty
            if score > best[1]:
                best = (whole, score)
    return best


@pytest.mark.slow
def test_a_wide_beam_finds_what_trying_everything_finds():
    lengths = set()
    for seed, penalty in itertools.product((0, 1), (0.0, 1.0, 2.0)):
        model, source = tiny_model(seed), sentences(3)
        search = Short(beam=(WORDS + 1) ** 4, length_penalty=penalty)
        for row, (numbers, score) in zip(
            source, translate_batch(model, source, search), strict=True
        ):
            wanted, best = exhaustive(model, row[row != PADDING], penalty)
            assert numbers == wanted and score == pytest.approx(best, abs=1e-5)
            lengths.add(len(numbers))
    assert len(lengths) > 1  # not all alike, or it would show little


def test_a_narrow_beam_is_greedy():
    model, source = tiny_model(words=8), sentences()
    for row, (numbers, _) in zip(
        source, translate_batch(model, source, BeamSearch(beam=1)), strict=True
    ):
        prefix = [BEGIN]
        while prefix[-1] != END and len(prefix) <= BeamSearch().limit(int((row != PADDING).sum())):
            with torch.no_grad():
                scores = model(row[None], torch.tensor([prefix]))[0, -1]
            scores[[BEGIN, PADDING]] = -torch.inf
            prefix.append(int(scores.argmax()))
        assert (numbers[:-1], numbers[-1]) == (prefix[1:-1], END)


@pytest.mark.parametrize("beam", [1, 4])
def test_cached_decoding_is_the_uncached_one(beam):
    model, source = tiny_model(words=20), sentences(12, 9)
    cached = translate_batch(model, source, BeamSearch(beam))
    whole = translate_batch(model, source, BeamSearch(beam), Whole)
    assert [numbers for numbers, _ in cached] == [numbers for numbers, _ in whole]
    for (_, one), (_, other) in zip(cached, whole, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize(
    ("parts", "tolerance"),
    [([], 1e-5), ([Sparsity(0.5)], 1e-5), ([Precision("fp16")], 3e-2)],
    ids=["plain", "sparse", "fp16"],
)
def test_steps_are_those_of_the_whole_model(parts, tolerance):
    """Longer than the widest kernel, whatever the plan made of the layers."""
    model = tiny_model(words=20)
    optimizer = torch.optim.Adam(model.parameters())
    model = apply(Plan.of(parts), model, optimizer, loss=sentence_loss).model.eval()
    source = sentences(3, 6)
    target = torch.randint(4, 24, (3, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        whole = model(source, target).float().log_softmax(-1)
        cached = Incremental(model, source, 1)
        steps = [cached.step(target[:, t : t + 1])[:, 0] for t in range(40)]
    assert torch.stack(steps, 1).sub(whole).abs().max() < tolerance


def test_a_sentence_is_translated_alike_in_any_batch():
    model, source = tiny_model(words=20), sentences(9, 8)
    rows = [row[row != PADDING].tolist() for row in source]
    device = torch.device("cpu")
    together = translate(model, rows, BeamSearch(), device=device)
    alone = [translate(model, [row], BeamSearch(), device=device)[0] for row in rows]
    small = translate(model, rows, BeamSearch(), tokens=10, device=device)
    assert together == alone == small
    assert not model.training


def test_the_longest_translation_ends():
    model = tiny_model(words=20)
    with torch.no_grad():
        model.decoder.output.weight[END] = 0
        model.decoder.output.weight[END] -= 10 * model.decoder.output.weight[4:].mean(0)
    for row, (numbers, _) in zip(
        sentences(), translate_batch(model, sentences(), BeamSearch()), strict=True
    ):
        assert numbers[-1] == END and len(numbers) <= BeamSearch().limit(
            int((row != PADDING).sum())
        )
