"""Files that were damaged or made to do harm: each is taken or refused; nothing else happens."""

import gzip
import hashlib
import io
import json
import lzma
import math
import os
import pickle
import shutil
import tomllib
import warnings
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from fuzzing import ODD, attacked, damaged, swapped
from test_loop import ALL, CPU, PLAIN, run, settings

from chaos import SEED, asked
from shoestring import Offload, OptimizerState, Plan, Precision, Sparsity
from shoestring.lab.records.run import FILE, read
from shoestring.lab.runs import snapshot
from shoestring.lab.runs.average import mean_of, weights_in
from shoestring.lab.runs.trainer import STATE, Trainer
from shoestring.lab.study.expand import expand
from shoestring.lab.study.page import page
from shoestring.lab.study.report import report
from shoestring.lab.study.results import load_results
from shoestring.lab.study.spec import load as load_study
from shoestring.lab.study.tables import tables
from shoestring.lab.tasks.corpus import read_corpus
from shoestring.lab.tasks.plain_pickle import load_arrays
from shoestring.lab.tasks.prepared import load as load_prepared
from shoestring.lab.tasks.prepared import save as save_prepared
from shoestring.lab.tasks.text import encoded
from shoestring.lab.tasks.token_batches import TextFeed
from tiers import slow_but
from tiny_nets import small_task
from tiny_texts import small_text

SHARES = {
    "snapshots": 0.2,
    "plans": 0.2,
    "studies": 0.2,
    "records": 0.2,
    "prepared text": 0.1,
    "data": 0.1,
    "configurations": 0.02,
    "data sets": 0.05,
    "checks": 0.02,
    "states": 0.05,
}


def named(folder, data, step=3, kind="snapshot"):
    """A file that has the right checksum in its name."""
    path = folder / f"{kind}-{step:09d}-{hashlib.sha256(data).hexdigest()[:16]}.pt"
    path.write_bytes(data)
    return path


def fuzz_snapshots(count, chance, tmp_path):
    """Bytes under a right checksum; states with other values; loaded into a run of that kind."""
    made = {}
    for name, plan in (("plain", PLAIN), ("all", ALL)):
        run(tmp_path / name, plan, stop_after=6)
        path = snapshot.found(tmp_path / name)[-1]
        trainer = Trainer(settings(plan), small_task(), CPU, predict=False)
        made[name] = path.read_bytes(), snapshot.load(path), trainer
    folder = tmp_path / "fuzzed"
    folder.mkdir()
    for number in range(count):
        data, state, trainer = made[chance.choice(list(made))]
        if number % 2:
            written = damaged(data, chance)
        else:
            buffer = io.BytesIO()
            torch.save(swapped(state, chance), buffer)
            written = buffer.getvalue()
        path = named(folder, written, kind=chance.choice(("snapshot", "snapshot", "weights")))
        with attacked("snapshots", written[:200]):
            if path.name.startswith("weights"):
                mean_of([weights_in(path)])
            else:
                found, _ = snapshot.load_latest(folder, keys=STATE)
                trainer.load_state_dict(found)
        path.unlink(missing_ok=True)


PLAN = ALL.to_toml()


def fuzz_plans(count, chance, tmp_path):
    """Bytes of TOML and JSON, and plans with other values."""
    given = tomllib.loads(PLAN)
    for number in range(count):
        path = tmp_path / ("plan.toml" if number % 2 else "plan.json")
        text = PLAN if number % 2 else json.dumps(given)
        if number % 3:
            path.write_bytes(damaged(text.encode(), chance))
        elif number % 2:
            path.write_text(toml(swapped(given, chance)), errors="surrogateescape")
        else:
            path.write_text(json.dumps(swapped(given, chance)))
        with attacked("plans", path.read_bytes()):
            plan = Plan.load(path)
            str(plan), plan.to_toml(), plan.to_json()


def toml(tables):
    """Tables of plain values as TOML; what it has no word for is left to be refused."""
    lines = []
    for name, value in tables.items() if isinstance(tables, dict) else ():
        if isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
            for one in value:
                lines += [f"[[{json.dumps(name)}]]", *pairs(one)]
        elif isinstance(value, dict):
            lines += [f"[{json.dumps(name)}]", *pairs(value)]
        else:
            lines = [f"{json.dumps(name)} = {inline(value)}", *lines]
    return "\n".join(lines)


def pairs(table):
    return [f"{json.dumps(name)} = {inline(value)}" for name, value in table.items()]


def inline(value):
    if isinstance(value, dict):
        return "{" + ", ".join(pairs(value)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(inline, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return '""' if value is None else json.dumps(value)


STUDY = """
title = "A study"
notes = "of nothing"
score = "best_accuracy"
trials = 2
baseline = {precision = "fp32"}
columns = ["counted_bytes", "score"]
[base]
model = "tiny_nets:tiny_linear"
data = "digits"
batch = 200
epochs = 2
[[search]]
per = ["precision"]
over = {lr = [0.02, 0.1]}
seeds = [7]
[[grid]]
precision = ["fp32", "bf16"]
labels = {family = "wide"}
[[grid]]
simulated = true
microbatch = 50
sparsity.density = 0.5
stands_for = {simulated = false}
[[target]]
where = {precision = "bf16"}
score = 90.0
counted_bytes = 1_000_000
[[figure]]
name = "front"
kind = "front"
series = "family"
"""


def fuzz_studies(count, chance, tmp_path):
    """Bytes of TOML, and studies with other values; expanded, as before a first run."""
    given, path = tomllib.loads(STUDY), tmp_path / "study.toml"
    for number in range(count):
        if number % 2:
            path.write_bytes(damaged(STUDY.encode(), chance))
        else:
            path.write_text(toml(swapped(given, chance)), errors="surrogateescape")
        with attacked("studies", path.read_bytes()):
            expand(load_study(path), lambda job: None)


def fuzz_records(count, chance, tmp_path):
    """Lines of records, as bytes and as values; in a study's folder and in a loose one."""
    folder = tmp_path / "runs"
    for seed in (0, 1):
        run(folder / f"good-{seed}", ALL, epochs=1, seed=seed)
    events = read(folder / "good-0")
    odd = folder / "odd"
    for number in range(count):
        shutil.rmtree(odd, ignore_errors=True)
        odd.mkdir()
        if number % 2:
            data = damaged((folder / "good-0" / FILE).read_bytes(), chance)
        else:
            changed = swapped(events, chance)
            held = changed if isinstance(changed, list) else [changed]
            lines = [json.dumps(event) for event in held]
            data = "\n".join(lines).encode(errors="backslashreplace")
        (odd / (FILE if number % 10 else "failure.json")).write_bytes(data)
        with attacked("records", data[:3000]):
            results = load_results(folder)
            made = tables(results)
            [(t.markdown().encode(), t.latex().encode()) for t in made]
            text = page(results, made)
            inside = text.partition('type="application/json">')[2].partition("</script>")[0]
            json.loads(inside or "{}", parse_constant=pytest.fail)
            # One odd run does not take the others with it.
            assert {"good-0", "good-1"} <= results.outcomes.keys()
            if number % 200 == 0:
                report(folder, tmp_path / "report")


def fuzz_prepared(count, chance, tmp_path):
    """Every file of a prepared text; what is taken must make batches."""
    good = tmp_path / "good"
    save_prepared(small_text(), good)
    odd = tmp_path / "odd"
    shutil.copytree(good, odd)
    names = sorted(path.name for path in good.iterdir())
    arrays = dict(np.load(good / "pairs.npz"))
    about = json.loads((good / "notes.json").read_text())
    for number in range(count):
        name = chance.choice(names)
        if number % 3 == 0:
            data = json.dumps(swapped(about, chance)).encode()
            name = "notes.json"
        elif number % 3 == 1:
            held = dict(arrays)
            key = chance.choice(list(held))
            flat = held[key].copy()
            flat[chance.randrange(len(flat))] = chance.choice((0, 1, 65535, 40_000, 7))
            kinds = ("f4", "i8", "u1", "i4", "c8", "S3")
            held[key] = flat.astype(chance.choice(kinds)) if chance.random() < 0.5 else flat
            buffer = io.BytesIO()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                np.savez(buffer, **held)
            data, name = buffer.getvalue(), "pairs.npz"
        else:
            data = damaged((good / name).read_bytes(), chance)
        (odd / name).write_bytes(data)
        with attacked("prepared text", (name, data[:500])):
            task = load_prepared(odd)
            feed = TextFeed(task, 300, seed=0, device=CPU)
            feed.batch(0, 0), feed.held_out(300)
        (odd / name).write_bytes((good / name).read_bytes())


def fuzz_data(count, chance, tmp_path):
    """Pickles of arrays, and texts, plain and compressed."""
    batch = {
        b"data": np.arange(60, dtype=np.uint8).reshape(5, 12), b"labels": list(range(5)),
        b"batch_label": b"one of five",
    }  # fmt: skip
    pickles = [pickle.dumps(batch, protocol) for protocol in range(5)]
    text = tmp_path / "text"
    text.mkdir()
    lines = {"de": "ein kleines Haus\n" * 8, "en": "a small house\n" * 8}
    for part in ("train", "valid", "test"):
        for language, words in lines.items():
            (text / f"{part}.{language}").write_text(words)
    pack = {".gz": gzip.compress, ".xz": lzma.compress, "": bytes}
    for number in range(count):
        if number % 2:
            data = damaged(chance.choice(pickles), chance)
            with attacked("data", data):
                try:
                    found = load_arrays(data)
                    assert type(found) is dict
                except Exception as error:  # `cifar10` makes one line of whatever it raises
                    assert not isinstance(error, AssertionError)
            continue
        suffix = chance.choice(list(pack))
        name = f"train.{chance.choice(('de', 'en'))}"
        original = (text / name).read_bytes()
        (text / name).unlink()
        path = text / f"{name}{suffix}"
        path.write_bytes(damaged(pack[suffix](original), chance))
        with attacked("data", path.read_bytes()):
            encoded(read_corpus(text, "text"), merges=5)
        path.unlink()
        (text / name).write_bytes(original)


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16,
    "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "dtype": "bfloat16",
}  # fmt: skip


def fuzz_configurations(count, chance, tmp_path):
    """config.json, as bytes and as values; what is read is built on fake tensors."""
    pytest.importorskip("transformers")
    from shoestring.integrations.configurations import Configured

    path = tmp_path / "config.json"
    for number in range(count):
        data = json.dumps(LLAMA if number % 2 else swapped(LLAMA, chance)).encode()
        path.write_bytes(damaged(data, chance) if number % 2 else data)
        with attacked("configurations", path.read_bytes()):
            Configured(f"hf:{tmp_path}", tokens=4).build()


def fuzz_data_sets(count, chance, tmp_path):
    """Lengths of examples, in each of the forms that `plan --data` takes."""
    from shoestring.integrations.lengths import Lengths

    events = [{"input_ids": [1, 2, 3]}, {"length": 7}, {"length": 2}]
    array = io.BytesIO()
    np.save(array, np.array([3, 5, 9]))
    held = {"d.txt": b"3\n5\n9\n", "d.npy": array.getvalue()}
    for number in range(count):
        name = chance.choice(("d.jsonl", "d.txt", "d.npy"))
        if name == "d.jsonl":
            changed = swapped(events, chance) if number % 2 else events
            lines = changed if isinstance(changed, list) else [changed]
            held[name] = "\n".join(map(json.dumps, lines)).encode()
        data = held[name] if name == "d.jsonl" and number % 2 else damaged(held[name], chance)
        (tmp_path / name).write_bytes(data)
        with attacked("data sets", (name, data[:300])):
            str(Lengths.read(str(tmp_path / name), f"hf:{tmp_path}"))


CHECKS = """
[small]
model = "tiny_nets:tiny_linear"
input = ["4x3x32x32"]
device = "cpu"
optimizer = "sgd"
budget = "8 GB"
tolerance = 0.5
batch = 2
"""


def fuzz_checks(count, chance, tmp_path):
    """The file of `shoestring check`, and its baseline."""
    from shoestring.lab.checks import check_file

    file, baseline = tmp_path / "m.toml", tmp_path / "m.baseline.json"
    given = tomllib.loads(CHECKS)
    for number in range(count):
        file.write_text(CHECKS)
        baseline.write_text('{"small": 123456}')
        if number % 4 == 0:
            baseline.write_bytes(damaged(baseline.read_bytes(), chance))
        elif number % 4 == 1:
            baseline.write_text(json.dumps(swapped({"small": 123456}, chance)))
        elif number % 4 == 2:
            file.write_bytes(damaged(CHECKS.encode(), chance))
        else:
            file.write_text(toml(swapped(given, chance)), errors="surrogateescape")
        with attacked("checks", (file.read_bytes(), baseline.read_bytes())):
            [str(one) for one in check_file(file)]


def fuzz_states(count, chance, tmp_path):
    """Optimizer state in bits and on the host, loaded by runs of each of these plans."""
    kinds = {
        "8 bits": [OptimizerState(8, smallest=64)], "4 bits": [OptimizerState(4, smallest=64)],
        "host": [Offload(smallest=64)],
        "16 bits": [Precision("fp16")], "plain": [],
    }  # fmt: skip
    made = {}
    for name, techniques in kinds.items():
        plan = Plan.of(techniques)
        run(tmp_path / name, plan, stop_after=3)
        state = snapshot.load(snapshot.found(tmp_path / name)[-1])
        made[name] = state, Trainer(settings(plan), small_task(), CPU, predict=False)
    names = list(made)
    for number in range(count):
        one = chance.choice(names)
        other = chance.choice(names) if number % 3 == 0 else one
        state, trainer = made[one][0], made[other][1]
        step = state["step"]
        if number % 3:
            part = chance.choice(("optimizer", "optimizer", "techniques"))
            step = {**step, part: swapped(step[part], chance)}
        # Of another plan in the step alone, under the settings of this one.
        with attacked("states", (one, other)):
            trainer.load_state_dict({**made[other][0], "step": step})
            if number % 3 == 0:
                assert one == other or {one, other} == {"plain", "host"}, (one, other)


ATTACKS = {
    "plans": fuzz_plans,
    "studies": fuzz_studies,
    "records": fuzz_records,
    "prepared text": fuzz_prepared,
    "data": fuzz_data,
    "snapshots": fuzz_snapshots,
    "configurations": fuzz_configurations,
    "data sets": fuzz_data_sets,
    "checks": fuzz_checks,
    "states": fuzz_states,
}


@pytest.mark.parametrize("what", slow_but(3, ATTACKS))
def test_a_few_fuzzed_files(what, tmp_path):
    ATTACKS[what](12, Random(1), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("what", ATTACKS)
@pytest.mark.filterwarnings("ignore")
def test_many_fuzzed_files(what, tmp_path):
    count = math.ceil(SHARES[what] * asked("FUZZ", 200))
    ATTACKS[what](count, Random(f"{what} {SEED}"), tmp_path)


def test_what_is_no_file_does_not_wait(tmp_path):
    """A FIFO, a folder and a socket where a file should be."""
    for make in (os.mkfifo, os.mkdir):
        for name in (FILE, f"snapshot-{1:09d}-{'0' * 16}.pt", "pairs.npz", "notes.json"):
            folder = tmp_path / f"{make.__name__}-{name}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder / name)
            with attacked("what is no file", name):
                read(folder)
            with attacked("what is no file", name):
                snapshot.load_latest(folder)
            with attacked("what is no file", name):
                load_prepared(folder)
            with attacked("what is no file", name):
                run(folder, resume=True)
            with attacked("what is no file", name):
                load_results(tmp_path)


def test_an_index_out_of_bounds_is_refused(tmp_path):
    """A kernel would read and write elsewhere."""
    sparse = Plan.of([Sparsity(0.02)])
    run(tmp_path / "run", sparse, stop_after=3)
    state = snapshot.load(snapshot.found(tmp_path / "run")[-1])
    trainer = Trainer(settings(sparse), small_task(), CPU, predict=False)
    names = [name for name in state["step"]["model"] if name.endswith("_index")]
    chance = Random(0)
    for name in names:
        for value in (0, 255, 7):
            for _ in range(10):
                index = state["step"]["model"][name].clone()
                index[chance.randrange(len(index))] = value
                changed = {**state["step"]["model"], name: index}
                with attacked("indices of sparse tensors", name):
                    trainer.load_state_dict({**state, "step": {**state["step"], "model": changed}})
                    trainer.step.model(torch.zeros(2, 3, 32, 32))


def test_odd_values_are_many():
    assert len(ODD) > 25 and Path(__file__).exists()
