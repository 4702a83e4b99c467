"""TRL's SFTTrainer and PEFT's LoRA under a plan: as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shoestring as ss

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")
peft = pytest.importorskip("peft", reason="needs peft")

from integrations.test_transformers_trainer import (  # noqa: E402
    CHECKPOINTED,
    arguments,
    dataset,
    model,
    same_weights,
    trained,
)
from shoestring.integrations.transformers import Budgeted, BudgetTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries' own


def adapted() -> Any:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    return peft.get_peft_model(model(), config)


def test_lora_trains_as_without_us(tmp_path: Path) -> None:
    torch.manual_seed(5)
    plain, expected = trained(transformers.Trainer, tmp_path / "a", adapted())
    torch.manual_seed(5)
    planned, found = trained(BudgetTrainer, tmp_path / "b", adapted(), plan=CHECKPOINTED)
    assert found == expected
    assert same_weights(plain, planned)


def sft(kind: Any, folder: Path, **own: Any) -> tuple[Any, list[Any]]:
    trl = pytest.importorskip("trl", reason="needs trl")
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{n}": n for n in range(128)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="w1", eos_token="w2", unk_token="w0"
    )
    rows = [{"input_ids": row["input_ids"].tolist()} for row in dataset()]
    shared = arguments(folder).to_dict()
    names = (
        "per_device_train_batch_size",
        "logging_steps",
        "learning_rate",
        "seed",
        "max_grad_norm",
    )
    args = trl.SFTConfig(
        output_dir=str(folder), report_to=[], use_cpu=True, disable_tqdm=True, max_steps=4,
        save_strategy="no", gradient_accumulation_steps=2, gradient_checkpointing=False,
        bf16=False, dataloader_pin_memory=False, **{name: shared[name] for name in names},
    )  # fmt: skip
    made = kind(trl.SFTTrainer)
    trainer = made(
        model=model(), args=args, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer, **own,
    )  # fmt: skip
    trainer.train()
    timed = ("runtime", "second", "flos")
    history = trainer.state.log_history
    logs = [{k: v for k, v in x.items() if not any(t in k for t in timed)} for x in history]
    return trainer, logs


def budgeted(kind: Any) -> Any:
    return type("BudgetSFT", (Budgeted, kind), {})


def test_sft_logs_the_same_lines(tmp_path: Path) -> None:
    plain, expected = sft(lambda kind: kind, tmp_path / "a")
    planned, found = sft(budgeted, tmp_path / "b", plan=CHECKPOINTED)
    assert found == expected
    assert {"loss", "grad_norm", "mean_token_accuracy", "num_tokens"} <= found[0].keys()
    assert same_weights(plain, planned)


def test_sft_stays_within_a_budget_by_microbatches(tmp_path: Path) -> None:
    _, expected = sft(lambda kind: kind, tmp_path / "a")
    planned, found = sft(budgeted, tmp_path / "b", plan=[ss.Microbatching(3)])
    for one, other in zip(expected, found, strict=True):
        for key in one:  # of the whole batch
            assert other[key] == pytest.approx(one[key], rel=1e-3), key
    assert planned.step.plan.short() == "microbatch 3"
    budgeted_too, found = sft(budgeted, tmp_path / "c", budget="1 GB")
    assert budgeted_too.step.plan.short() == "plain"
    assert found == expected
