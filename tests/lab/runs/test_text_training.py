"""Translation through the loop: what a run leaves behind, exact microbatches, exact resumption."""

import io
import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_loop import assert_same, final

from shoestring import (Checkpointing, Microbatching, Plan, Precision, Sparsity)
from shoestring.cli.main import main
from shoestring.errors import InputError
from shoestring.lab.models import sentence_loss
from shoestring.lab.records.run import read, strip_times
from shoestring.lab.tasks.bpe import PADDING, Vocabulary
from shoestring.lab.tasks.prepared import save
from shoestring.lab.tasks.token_batches import TextFeed
from shoestring.lab.runs import loop, snapshot, translating
from shoestring.step.apply import apply
from shoestring.lab.runs.command import Call, start
from shoestring.lab.runs.loop import train
from shoestring.lab.runs.text_job import build_text_model, weighted_by_tokens
from shoestring.lab.runs.text_settings import text_settings_for
from shoestring.lab.runs.trainer import Trainer
from shoestring.lab.runs.translating import load_translator
from tiny_texts import SMALL, small_text
from tiers import slow_but

CPU = torch.device("cpu")
TOKENS = Microbatching(100, unit="tokens")
ALL = Plan.of(
    [Sparsity(0.5, schedule=((30, 3),)), Precision("bf16"), Checkpointing("residual-1"), TOKENS]
)


def settings(plan=Plan(), **others):  # noqa: B008 (frozen)
    given = {"updates": 10, "batch": 300, "learning_rate": 3e-3, "warmup": 5, "average": 2}
    return text_settings_for(SMALL, "number_words", small_text(), plan=plan, **{**given, **others})


def run(folder, plan=Plan(), *, resume=False, stop_after=None, **others):  # noqa: B008
    return train(
        settings(plan, **others),
        small_text(),
        folder,
        device=CPU,
        resume=resume,
        snapshot_every=5,
        stop_after=stop_after,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    return folder, run(folder)


def test_records_tell_the_run(finished):
    folder, end = finished
    events = read(folder)
    steps = TextFeed(small_text(), 300, seed=0, device=CPU).steps_per_epoch
    epochs = 10 // steps
    assert [e["event"] for e in events] == ["start", *["evaluation"] * (epochs + 1), "end"]
    start, *evaluations, written = events
    assert start["settings"]["updates"] == 10 and start["data"]["pairs_trained_on"] == 120
    assert start["data"]["remarks"] == {} and len(start["data"]["batch_shapes"]) <= 8
    assert [e["step"] for e in evaluations] == [*range(steps, 11, steps), 10]
    assert evaluations[0]["loss"] > evaluations[-1]["loss"] == written["loss"]
    assert written["best_loss"] == min(e["loss"] for e in evaluations)
    assert written["averaged_epochs"] == 2 and written["translated"] == 12
    assert "tok:none" in written["bleu_signature"] and 0 <= written["bleu"] <= 100
    assert end["bleu"] == written["bleu"]
    assert written["predicted"]["step_peak_bytes"] == pytest.approx(
        written["measured_peak_bytes"], rel=0.02
    )


@pytest.mark.parametrize("kind", [None, "fp32", "fp16"])
def test_on_cuda_adam_in_fp32_can_be_captured_however_it_was_asked_for(kind):
    plan = Plan() if kind is None else Plan.of([Precision(kind)])
    trainer = Trainer(settings(plan), small_text(), CPU, predict=False)
    optimizer = trainer.job.optimizer(trainer.job.model()[0], torch.device("cuda"))
    assert optimizer.defaults["capturable"] is (kind != "fp16")


def test_bleu_of_the_run_is_what_the_command_line_says(finished):
    folder, end = finished
    files = [str(folder / "references.txt"), "-i", str(folder / "translations.txt")]
    command = [sys.executable, "-m", "sacrebleu", *files, "-tok", "none", "--force", "-w", "6"]
    printed = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert (round(end["bleu"], 6), end["bleu_signature"]) == (
        printed["score"],
        printed["signature"],
    )


def test_the_average_is_the_mean(finished):
    """Of the weights at the ends of the last two epochs, computed by hand; what translates."""
    folder, end = finished
    kept = snapshot.found(folder, "weights")
    assert len(kept) == end["averaged_epochs"] == 2
    states = [snapshot.load(path)["model"] for path in kept]
    translator = load_translator(folder, device=CPU)
    assert translator.averaged == 2
    for name, value in translator.model.state_dict().items():
        assert torch.allclose(value, (states[0][name] + states[1][name]) / 2, rtol=0, atol=1e-7)
    newest = load_translator(folder, device=CPU, average=False)
    assert_same(dict(newest.model.state_dict()), dict(final(folder)["step"]["model"]))


def test_a_run_translates_by_itself(finished):
    folder, _ = finished
    task = small_text()
    sources = [n for n in range(len(task.test[0]))]
    pieces = [task.source_vocabulary.decode(task.test[0][n]) for n in sources]
    lines = [line.replace("@@ ", "") for line in pieces]
    made = load_translator(folder, device=CPU)([*lines, "", "  "])
    assert made[:-2] == (folder / "translations.txt").read_text().splitlines()
    assert made[-2:] == ["", ""]


@pytest.mark.parametrize("text", [b"eins\nzwei", b"eins\nzwei\n"])
def test_the_last_line_needs_no_end(monkeypatch, capsys, text):
    assert translated(monkeypatch, capsys, text) == ("eins\nzwei\n", "")


def test_lines_that_are_no_text_are_translated_and_remarked_on(monkeypatch, capsys):
    out, said = translated(monkeypatch, capsys, b"\xef\xbb\xbfeins\nf\xfcnf\n")
    assert out == "eins\nf\ufffdnf\n"
    assert "warning: 1 lines are not UTF-8, the first is line 2" in said


def translated(monkeypatch, capsys, text):
    """What the command prints where every line is its own translation."""
    monkeypatch.setattr(translating, "load_translator", lambda *given, **named: list)
    monkeypatch.setattr(sys, "argv", ["shoestring", "translate", "run", "--device", "cpu"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text), encoding="utf-8"))
    monkeypatch.setattr("warnings.showwarning", None)  # main() replaces it
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr()
    return printed.out, "".join(s for s in printed.err.splitlines(True) if "loading" not in s)


def test_translating_leaves_a_snapshot_that_is_being_written(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    (folder / ".snapshot.partial").write_bytes(b"half of one")
    load_translator(folder, device=CPU, average=False)
    assert (folder / ".snapshot.partial").exists()


def test_a_damaged_snapshot_is_not_passed_over_in_silence(finished, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    newest = snapshot.found(folder)[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    load_translator(folder, device=CPU, average=False)
    assert f"{newest.name} is damaged" in capsys.readouterr().err


def test_a_rank_without_the_whole_state_keeps_no_weights(monkeypatch, tmp_path):
    """As under fsdp: the state is rank 0's, the others only take part in gathering it."""
    trainer = Trainer(settings(), small_text(), CPU, predict=False)
    monkeypatch.setattr(trainer.step, "state_dict", dict, raising=False)
    monkeypatch.setattr(loop, "on_first", lambda call: None)
    loop._keep_weights(tmp_path, trainer)
    assert not list(tmp_path.iterdir())


def test_a_run_goes_on_with_its_own_words_only(tmp_path):
    run(tmp_path, stop_after=2)
    task = small_text()
    pieces = list(task.source_vocabulary.pieces)
    pieces[-1], pieces[-2] = pieces[-2], pieces[-1]
    other = replace(task, source_vocabulary=Vocabulary(tuple(pieces)))
    with pytest.raises(InputError, match="began with other words than number_words has now"):
        train(settings(), other, tmp_path, device=CPU, resume=True)


@pytest.mark.parametrize("plan", slow_but(1, [Plan(), ALL]), ids=["plain", "all four"])
def test_resumed_run_is_the_uninterrupted_one(tmp_path, plan):
    run(tmp_path / "whole", plan)
    for stop in (2, 7):
        run(tmp_path / "parts", plan, resume=True, stop_after=stop)
        random.seed(stop), np.random.seed(stop), torch.manual_seed(stop)
    run(tmp_path / "parts", plan, resume=True)
    assert_same(final(tmp_path / "whole"), final(tmp_path / "parts"))
    whole, parts = (strip_times(read(tmp_path / name)) for name in ("whole", "parts"))
    assert [json.dumps(e) for e in whole] == [json.dumps(e) for e in parts]
    kept = [[p.name for p in snapshot.found(tmp_path / n, "weights")] for n in ("whole", "parts")]
    assert kept[0] == kept[1] and len(kept[0]) == 2


def gradients(plan, batch):
    torch.manual_seed(0)
    task = small_text()
    model, loss = build_text_model(SMALL, task.source_vocabulary, task.target_vocabulary, 0.0)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    value = apply(weighted_by_tokens(plan), model, optimizer, loss=loss)(batch)
    return float(value), {name: before[name] - p for name, p in model.named_parameters()}


def test_microbatches_of_tokens_are_exact():
    """Sentences of other lengths, and rows of padding: loss and gradients of the whole batch."""
    feed = TextFeed(small_text(), 300, seed=0, device=CPU)
    batches = [feed.batch(0, number) for number in range(feed.steps_per_epoch)]
    padded = [b for b in batches if (b["target_out"] == PADDING).all(1).any()]
    assert padded  # the longest sentences do not fill their last batch
    for batch in (batches[0], padded[0]):
        whole, parts = gradients(Plan(), batch), gradients(Plan.of([TOKENS]), batch)
        assert whole[0] == pytest.approx(parts[0], rel=1e-12)
        for name in whole[1]:
            assert torch.allclose(whole[1][name], parts[1][name], rtol=1e-9, atol=1e-14)


def test_microbatches_hold_as_many_sentences_as_fit():
    sizes = []
    for rows, length in ((20, 5), (12, 10), (4, 40)):
        tensors = {"a": torch.zeros(rows, length), "b": torch.zeros(rows, length)}
        assert Microbatching(30, unit="tokens").examples_at_once(tensors) == max(30 // length, 1)
        sizes.append(Microbatching(30, unit="tokens").prepare(tensors)["a"].shape)
    assert sizes == [(6, 5), (3, 10), (1, 40)]
    with pytest.raises(InputError, match="unknown microbatch unit 'words'"):
        Microbatching(30, unit="words")
    plan = Plan.of([TOKENS])
    assert Plan.from_dict(plan.to_dict()) == plan


def test_learning_rates_rise_and_fall(tmp_path):
    trainer = Trainer(settings(first := Plan()), small_text(), CPU, predict=False)
    assert first == Plan()
    rates = []
    for _ in range(8):
        trainer.advance()
        rates.append(trainer.step.optimizer.param_groups[0]["lr"])
    assert rates[4] == pytest.approx(3e-3) and rates == sorted(rates[:5]) + rates[5:]
    assert rates[7] == pytest.approx(3e-3 * (5 / 8) ** 0.5)
    assert trainer.step.optimizer.defaults["betas"] == (0.9, 0.98)


def test_settings_that_cannot_be():
    for wrong, message in (
        ({"updates": 0}, "updates 0 is below 1"),
        ({"epochs": 2}, "--updates and --epochs are both given"),
        ({"dropout": 1.0}, r"dropout 1 is not in \[0, 1\)"),
        ({"beam": 0}, "a beam of 0 holds nothing"),
        ({"length_penalty": float("nan")}, r"length penalty nan is not in \[-10, 10\]"),
        ({"length_penalty": 1000.0}, r"length penalty 1000 is not in \[-10, 10\]"),
    ):
        with pytest.raises(InputError, match=message):
            settings(**wrong)
    steps = settings().steps_per_epoch(small_text())
    assert settings(updates=None, epochs=3).updates == 3 * steps


def test_models_that_do_not_take_sentences():
    task = small_text()
    for name, message in (("wrn-10-1", "does not take sentences"), ("no_such:b", "cannot import")):
        with pytest.raises(InputError, match=message):
            build_text_model(name, task.source_vocabulary, task.target_vocabulary, 0.1)


def test_a_folder_without_a_text_run(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        load_translator(tmp_path, device=CPU)


def test_sentence_loss_is_the_mean_of_words():
    """The loss that microbatches weigh by words is itself a mean over words."""
    feed = TextFeed(small_text(), 300, seed=0, device=CPU)
    task = small_text()
    torch.manual_seed(0)
    model, loss = build_text_model(SMALL, task.source_vocabulary, task.target_vocabulary, 0.0)
    model.eval()
    assert loss is sentence_loss
    batch = feed.batch(0, 0)
    words = (batch["target_out"] != PADDING).sum(1)
    with torch.no_grad():
        each = [loss(model, {k: t[n : n + 1] for k, t in batch.items()}) for n in range(len(words))]
        whole = loss(model, batch)
    mean = sum(one * n for one, n in zip(each, words, strict=True)) / words.sum()
    assert torch.allclose(whole, mean, rtol=1e-4)


def test_flags_of_text_are_refused_for_images(tmp_path):
    with pytest.raises(InputError, match="--updates is for translation, and digits is images"):
        start(Call("wrn-10-1", "digits", updates=10, device="cpu", out=str(tmp_path / "run")))
    with pytest.raises(InputError, match="digits has no merges"):
        start(Call("wrn-10-1", "digits", merges=10, device="cpu", out=str(tmp_path / "run")))


@pytest.mark.slow
def test_a_budget_makes_a_plan_in_tokens(tmp_path, capsys):
    """From a prepared folder, as the command line calls it; the peak stays within the budget."""
    save(small_text(), tmp_path / "text")
    call = Call(
        SMALL, str(tmp_path / "text"), budget="1 MB", allow="lossless", updates=4, batch=300,
        device="cpu", out=str(tmp_path / "run"),
    )  # fmt: skip
    result = start(call)
    micro = result.settings.plan.microbatching
    assert micro is not None and micro.unit == "tokens"
    assert 0 < result.event["measured_peak_bytes"] <= 1_000_000
    assert "BLEU" in str(result)
