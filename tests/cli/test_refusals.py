"""Users' mistakes end in one line with status 2, and nothing is written before they are found."""

import json
import textwrap
from pathlib import Path

import pytest
from calling import call, listed

from shoestring import Plan
from shoestring.lab.runs.folder import component

DIGITS = ("--data", "digits", "--batch", "9", "--epochs", "1", "--no-predict", "--device", "cpu")
MODELS = """
    import sys, torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self, inside=3072):
            super().__init__()
            self.linear, self.norm = nn.Linear(inside, 10), nn.BatchNorm1d(10)

        def forward(self, x):
            return self.norm(self.linear(x.flatten(1)))

    def good(): return Net()
    def shape(): return Net(7)
    def frozen(): return Net().requires_grad_(False)

    def failing(error):
        class Failing(Net):
            def forward(self, x):
                raise error
        return Failing

    raises, ends = failing(KeyError("boom")), failing(EOFError("no more"))
    leaves = failing(SystemExit(5))

    class backward(Net):
        def forward(self, x):
            y = self.linear(x.flatten(1))
            y.register_hook(lambda g: 1 / 0)
            return y

    class no_evaluation(Net):
        def forward(self, x):
            if not self.training:
                raise RuntimeError("only in training")
            return super().forward(x)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with a module of models in it."""
    inside = tmp_path / "a" / "b" / "here"
    inside.mkdir(parents=True)
    (inside / "odd_models.py").write_text(textwrap.dedent(MODELS))
    (inside / "leaves_at_import.py").write_text("import sys; sys.exit(5)")
    (inside / "ends_at_import.py").write_text("raise EOFError('at import')")
    monkeypatch.chdir(inside)
    monkeypatch.syspath_prepend(str(inside))
    return inside


@pytest.mark.parametrize("model", ["../../../evil", "/evil", "wrn-10-1/../../x", "x" * 300, "."])
def test_a_models_name_is_no_path(here, tmp_path, model):
    before = listed(tmp_path)
    assert call("train", model, *DIGITS).refused
    assert listed(tmp_path) == before
    for name in (model, "\0", "a\nb", "ünï", ""):
        assert Path(component(name)).name == component(name) != ""


@pytest.mark.parametrize(
    "call_of",
    [
        ("nosuch", *DIGITS),
        ("wrn-10-1", "--data", "nosuch"),
        ("dc-transformer", *DIGITS),
        ("odd_models:nosuch", *DIGITS),
        ("odd_models:shape", *DIGITS),
        ("odd_models:raises", *DIGITS),
        ("odd_models:ends", *DIGITS),
        ("odd_models:leaves", *DIGITS),
        ("odd_models:backward", *DIGITS),
        ("odd_models:frozen", *DIGITS),
        ("leaves_at_import:x", *DIGITS),
        ("ends_at_import:x", *DIGITS),
        ("odd_models:good", *DIGITS, "--microbatch", "4"),
        ("odd_models:good", *DIGITS, "--microbatch", "1"),
        ("odd_models:good", *DIGITS, "--microbatch", "10"),
        ("odd_models:good", *DIGITS, "--batch", "0"),
        ("odd_models:good", *DIGITS, "--batch", "99999"),
        ("odd_models:good", *DIGITS, "--lr", "nan"),
        ("odd_models:good", *DIGITS, "--lr", "inf"),
        ("odd_models:good", *DIGITS, "--seed", "-1"),
        ("odd_models:good", *DIGITS, "--stop-after", "9" * 5000),
        ("odd_models:good", *DIGITS, "--snapshot-every", "0"),
        ("odd_models:good", *DIGITS, "--set", "sparsity.threshold=" + "9" * 5000),
        ("odd_models:good", *DIGITS, "--plan", "nosuch.toml"),
        ("odd_models:good", *DIGITS, "--tensorboard"),
    ],
    ids=lambda value: " ".join(value)[:60],
)
@pytest.mark.parametrize("out", [(), ("--out", "new/folder")], ids=["", "out"])
def test_a_refused_training_writes_nothing(here, tmp_path, call_of, out):
    before = listed(tmp_path)
    found = call("train", *call_of, *out)
    assert found.refused, found
    assert listed(tmp_path) == before


def test_a_model_that_fails_later_says_when(here):
    found = call("train", "odd_models:no_evaluation", *DIGITS, "--out", "run")
    assert found.status == 1 and found.raised is None
    assert "RuntimeError in update 160: only in training" in found.err
    assert "odd_models:raises raised KeyError in update 1: 'boom'" in (
        call("train", "odd_models:raises", *DIGITS).err
    )


@pytest.mark.parametrize("verb", ["profile", "verify", "plan"])
@pytest.mark.parametrize("model", ["raises", "ends", "leaves", "backward", "shape", "frozen"])
def test_what_a_model_raises_is_one_line(here, verb, model):
    more = ("--budget", "1 MB") if verb == "plan" else ()
    found = call(verb, f"odd_models:{model}", "--input", "4x3x32x32", *more)
    assert found.refused, found
    assert "InputError" in found.err or "TraceError" in found.err


@pytest.mark.parametrize("size", [1, 2])
def test_batchnorm_over_one_example_is_one_line(here, size):
    found = call(*("verify", "odd_models:good", "--input", "5x3x32x32", "--microbatch", size))
    assert found.refused and "more than 1 value per channel" in found.err


@pytest.mark.parametrize("size", [1, 4])  # a part of one, and a rest of one of nine
def test_training_batchnorm_over_one_example_is_one_line(here, tmp_path, size):
    before = listed(tmp_path)
    found = call("train", "odd_models:good", *DIGITS, "--microbatch", size, "--out", "run")
    assert found.refused and "more than 1 value per channel" in found.err
    assert listed(tmp_path) == before


def test_the_reason_of_an_eoferror_is_not_lost(here, monkeypatch):
    """Typer takes one for the end of its own input, and said "stopped"."""
    import shoestring.lab.runs.command as command

    def broken(*_):
        raise EOFError("a defect of ours")

    monkeypatch.setattr(command, "start", broken)
    found = call("train", "odd_models:good", *DIGITS)
    assert found.status != 130 and "a defect of ours" in str(found.raised)


NUMBER = "9" * 5000
DEEP = "[" * 50_000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.toml", ""),
        ("p.json", ""),
        ("p.toml", f"[microbatching]\nsize = {NUMBER}"),
        ("p.json", f'{{"microbatching": {{"size": {NUMBER}}}}}'),
        ("p.toml", f"a = {DEEP}"),
        ("p.json", DEEP),
        ("p.toml", "[precision]\nkind = 7"),
        ("p.toml", "[sparsity]\ndensity = nan"),
        ("p.toml", "sparsity = 3"),
        ("p.toml", "[checkpointing]\nstrategy = 1979-05-27"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_plan_that_is_none(here, name, text):
    (here / name).write_text(text)
    found = call("verify", "odd_models:good", "--input", "4x3x32x32", "--plan", name)
    assert found.refused, found


@pytest.mark.parametrize(
    "shape", [NUMBER, f"4x{NUMBER}", "1x99999999999999999", "x".join("9" * 99)]
)
def test_an_input_with_too_many_digits(here, shape):
    assert call("profile", "odd_models:good", "--input", shape).refused


@pytest.mark.parametrize(
    "flags",
    [
        ("--checkpoint", "every-" + NUMBER),
        ("--checkpoint", "keep*" + NUMBER),
        ("--checkpoint", "keep*999999999999"),
        ("--density", "nan"),
        ("--density", NUMBER),
        ("--microbatch", NUMBER),
        ("--batch", NUMBER),
    ],
    ids=lambda value: " ".join(value)[:30],
)
def test_flags_with_odd_numbers(here, flags):
    assert call("profile", "wrn-10-1", *flags).refused


@pytest.mark.parametrize("verb", ["profile", "verify", "explain", "train"])
def test_a_microbatch_above_the_batch_is_refused_by_every_verb(here, verb):
    more = DIGITS if verb == "train" else ("--input", "9x3x32x32")
    found = call(verb, "odd_models:good", *more, "--microbatch", "10")
    assert found.refused and "10" in found.err, found


def test_json_has_no_nan(here):
    found = call("train", "odd_models:good", *DIGITS, "--json", "--out", "run")
    assert found.status == 0
    json.loads(found.out, parse_constant=pytest.fail)


def test_a_plan_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    """A disk that fills up leaves what was there."""
    import os

    path = tmp_path / "plan.toml"
    Plan().save(path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match="No space left"):
        Plan().save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["plan.toml"]
