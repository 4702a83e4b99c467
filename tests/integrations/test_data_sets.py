"""Plans over a data set: lengths scanned, the worst batch, evaluation."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shoestring as ss
from cli.calling import call
from shoestring.integrations.lengths import Lengths
from shoestring.integrations.worst_batch import worst_batch
from shoestring.step.predict import evaluation_bytes
from work import calls

transformers = pytest.importorskip("transformers", reason="needs transformers")


def test_a_million_lengths_are_read_in_two_calls_each(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(1, 4000, 1_000_000)
    tokens[654_320] = 5000
    file = tmp_path / "lengths.txt"
    file.write_text("\n".join(map(str, tokens)))
    made = []
    assert calls(lambda: made.append(Lengths.read(str(file)))) < 2.1e6
    found = made[0]
    assert found.longest == 5000 and np.array_equal(found.tokens, tokens)
    assert "1,000,000 examples" in str(found) and "(line 654,321)" in str(found)
    assert found.over(4999) == "1 of 1,000,000 examples (line 654,321: 5,000 tokens)"
    assert found.over(5000) == "" and found.cut(100).longest == 100


def test_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    rows = [{"input_ids": [5, 6, 7], "labels": [1, 2, 3]}, {"length": 9}, 4, {"input_ids": [1]}]
    file.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    found = Lengths.read(str(file))
    assert found.tokens.tolist() == [3, 9, 4, 1] and found.lines.tolist() == [1, 3, 5, 7]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.txt", "12\nmany\n", "line 2 is not a number"),
        ("a.txt", "\n\n", "has no examples"),
        ("a.txt", "3\n0\n", "line 2 has no tokens"),
        ("a.jsonl", "{", "line 1 is not JSON"),
        ("a.jsonl", '{"other": 3}', "line 1 has no input_ids, length or text"),
        ("a.jsonl", '{"text": "so long"}', "no tokenizer"),
        ("a.npy", "no array", "cannot be read"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, text: str, told: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ss.InputError, match=told):
        Lengths.read(str(tmp_path / name), f"hf:{tmp_path}")


class Texts(torch.utils.data.Dataset[Any]):
    """Sources and targets of random lengths; drawing one moves the random stream."""

    def __init__(self, count: int) -> None:
        self.source = np.random.default_rng(1).integers(2, 50, count)
        self.target = np.random.default_rng(2).integers(2, 50, count)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, at: int) -> dict[str, Any]:
        torch.rand(1)
        return {"input_ids": [1] * self.source[at], "labels": [1] * self.target[at], "name": "x"}


def test_the_worst_batch_is_the_largest_in_every_field() -> None:
    data = Texts(500)
    torch.manual_seed(0)
    drawn = torch.rand(1)
    torch.manual_seed(0)
    found = worst_batch(data, 4, lambda rows: rows)
    assert torch.equal(torch.rand(1), drawn)
    assert found is not None and found.whole and len(found.batch) == 4
    for field, sizes in (("input_ids", data.source), ("labels", data.target)):
        assert max(len(row[field]) for row in found.batch) == sizes.max()
    assert worst_batch(iter(data), 4, list) is None


def test_a_scan_that_takes_too_long_sees_all_parts() -> None:
    class Slow(Texts):
        def __getitem__(self, at: int) -> dict[str, Any]:
            time.sleep(0.001)
            seen.append(at)
            return super().__getitem__(at)

    seen: list[int] = []
    found = worst_batch(Slow(10_000), 2, list, seconds=0.2)
    assert found is not None and not found.whole and 64 <= found.seen < 1000
    assert {at // 2500 for at in seen} == {0, 1, 2, 3}


def test_columns_of_a_hugging_face_data_set() -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    data = datasets.Dataset.from_dict({"input_ids": [[1] * n for n in (3, 9, 2)], "n": [1, 2, 3]})
    found = worst_batch(data.select([2, 1]), 1, lambda rows: rows)
    assert found is not None and len(found.batch[0]["input_ids"]) == 9 and found.at == 1


def test_an_evaluation_holds_no_activations() -> None:
    """Weights, two moments, the batch, an input and an output of a layer, or one more."""
    layers = [nn.Linear(256, 256, bias=False) for _ in range(6)]
    model = nn.Sequential(*layers, nn.Dropout(0.5))
    batch = torch.randn(512, 256)
    needed = evaluation_bytes(
        model, batch, loss=lambda m, x: m(x).square().mean(), optimizer="adamw"
    )
    weights, row = 6 * 256 * 256 * 4, 512 * 256 * 4
    assert 3 * weights + 3 * row <= needed <= 3 * weights + 4.1 * row
    assert model.training


def tiny(folder: Path, layers: int = 2) -> str:
    transformers.LlamaConfig(
        vocab_size=500, hidden_size=64, intermediate_size=128, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2,
    ).save_pretrained(folder)  # fmt: skip
    return f"hf:{folder}"


@pytest.mark.slow
def test_a_plan_over_a_file(tmp_path: Path) -> None:
    model, file = tiny(tmp_path, layers=1), tmp_path / "lengths.txt"
    file.write_text("\n".join(map(str, [*range(8, 200), 1900, 60_000])))
    ask = ["plan", model, "--batch", 2, "--json", "--lengths", file]
    done = call(*ask, "--tokens", 512, "--eval-data", file, "--budget", "600 MB")
    assert done.status == 0, done.err
    told = json.loads(done.out)
    assert told["data"] == {"examples": 194, "longest_tokens": 512}
    assert 0 < told["eval_data"]["peak_bytes"] < 600e6
    done = call(*ask, "--budget", "600 MB")
    assert done.status == 1 and not done.out
    assert "1 of 194 examples (line 194: 60,000 tokens)" in done.err and "--tokens" in done.err
    done = call(
        *ask, "--tokens", 64, "--eval-data", file, "--eval-batch", 100_000, "--budget", "600 MB"
    )
    assert done.status == 1 and "evaluate " in done.err


def trainer(folder: Path, budget: str, **how: Any) -> Any:
    from shoestring.integrations.transformers import BudgetTrainer

    transformers.set_seed(0)
    config = transformers.AutoConfig.from_pretrained(tiny(folder).removeprefix("hf:"))
    model = transformers.AutoModelForCausalLM.from_config(config)
    rows = [{"input_ids": [1] * n, "labels": [1] * n} for n in [*[16] * 20, 400, *[16] * 19]]
    args = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=3, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no", **how,
    )  # fmt: skip
    return BudgetTrainer(
        model=model, args=args, train_dataset=rows, eval_dataset=rows, budget=budget,
        data_collator=padded,
    )  # fmt: skip


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    most = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([[*row["input_ids"], *[0] * (most - len(row["input_ids"]))] for row in rows])
    return {"input_ids": ids, "labels": ids.clone()}


def test_the_trainer_plans_for_the_longest_example(tmp_path: Path) -> None:
    made = trainer(tmp_path, "2 GB")
    made.train()
    short = padded([{"input_ids": [1] * 16}] * 4)
    first = ss.profile(
        made.model, short, loss=lambda m, b: m(**b).loss, optimizer="adamw", accounting="device"
    )
    assert made.step.plan.plain.peak_bytes > 1.5 * first.peak_bytes


def test_the_trainer_refuses_an_evaluation_that_does_not_fit(tmp_path: Path) -> None:
    made = trainer(
        tmp_path, "12 MB", eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=40
    )
    with pytest.raises(
        ss.BudgetError, match=r"evaluation takes .* with example 20 in a batch of 40"
    ):
        made.train()
