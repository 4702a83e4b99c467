"""Hugging Face's real Trainer with and without a plan: the same losses, updates, logs and files."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import shoestring as ss
from shoestring.memory.live.measure import measure

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")

from shoestring.integrations.transformers import PLAN_FILE, Budgeted, BudgetTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the Trainer's own
os.environ.setdefault("WANDB_DISABLED", "true")


def model(seed: int = 0, dropout: float = 0.0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        attention_dropout=dropout,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def dataset(count: int = 48, longest: int = 24) -> list[dict[str, Any]]:
    """Of different lengths, padded, so that means over tokens and over examples differ."""
    drawn = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        length = int(torch.randint(8, longest + 1, (), generator=drawn))
        words = torch.randint(3, 128, (longest,), generator=drawn)
        labels = words.clone()
        labels[length:] = -100
        made.append({"input_ids": words, "labels": labels})
    return made


def arguments(folder: Path, **changed: Any) -> Any:
    given = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "num_train_epochs": 2,
        "logging_steps": 1, "report_to": [], "use_cpu": True, "learning_rate": 1e-2,
        "max_grad_norm": 0.5, "warmup_steps": 2, "lr_scheduler_type": "cosine", "seed": 3,
        "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return transformers.TrainingArguments(**{**given, **changed})


def trained(kind: Any, folder: Path, built: Any = None, **given: Any) -> tuple[Any, list[Any]]:
    own = {
        name: given.pop(name) for name in ("budget", "plan", "allow", "callbacks") if name in given
    }
    resume = given.pop("resume", None)
    evaluated = {"eval_dataset": dataset(8)} if "eval_strategy" in given else {}
    trainer = kind(
        model=built or model(), args=arguments(folder, **given), train_dataset=dataset(),
        **evaluated, **own,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    timed = ("runtime", "second", "flos")
    logs = [
        {k: v for k, v in line.items() if not any(word in k for word in timed)}
        for line in trainer.state.log_history
    ]
    return trainer, logs


def same_weights(a: Any, b: Any) -> bool:
    pairs = zip(a.model.state_dict().values(), b.model.state_dict().values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


CHECKPOINTED = [ss.Checkpointing("residual-1")]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"gradient_accumulation_steps": 4, "max_grad_norm": 0.0, "optim": "sgd"},
        {"label_smoothing_factor": 0.1},
        {"bf16": True},
        {"eval_strategy": "steps", "eval_steps": 3, "max_steps": 7},
        {"optim": "adafactor", "lr_scheduler_type": "linear"},
    ],
    ids=lambda given: "-".join(given) or "default",
)
def test_a_lossless_plan_changes_no_bit_of_the_logs(tmp_path: Path, given: dict[str, Any]) -> None:
    plain, expected = trained(transformers.Trainer, tmp_path / "a", **given)
    planned, found = trained(BudgetTrainer, tmp_path / "b", plan=CHECKPOINTED, **given)
    assert found == expected
    assert any("grad_norm" in line and line["grad_norm"] > 0 for line in found)
    assert planned.state.global_step == plain.state.global_step
    assert same_weights(plain, planned)


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("mean", [False, True], ids=["items counted", "means"])
def test_microbatches_train_alike(tmp_path: Path, accumulated: int, mean: bool) -> None:
    """Also where the Trainer does not count items, and every batch's loss is a mean."""

    def built() -> Any:
        made = model()
        if mean:
            made.accepts_loss_kwargs = False
        return made

    given: dict[str, Any] = {"gradient_accumulation_steps": accumulated, "optim": "sgd"}
    _, expected = trained(transformers.Trainer, tmp_path / "a", built(), **given)
    planned, found = trained(
        BudgetTrainer, tmp_path / "b", built(), plan=[ss.Microbatching(3)], **given
    )
    assert len(found) == len(expected)
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, rel=1e-4)
    assert planned.step.plan.short() == "microbatch 3"


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_budget_holds(tmp_path: Path, accumulated: int) -> None:
    """Also where gradients wait for another batch."""
    batch = {k: torch.stack([d[k] for d in dataset(8)]) for k in ("input_ids", "labels")}
    needed = measure(
        model(), batch, loss=lambda m, b: m(**b).loss, optimizer="adamw"
    ).peak_bytes  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error", ss.BudgetWarning)
        planned, _ = trained(
            BudgetTrainer, tmp_path, budget=int(0.75 * needed),
            gradient_accumulation_steps=accumulated,
        )  # fmt: skip
    assert planned.step.plan.short() != "plain"
    assert planned.step.measured is not None
    assert planned.step.measured.peak_bytes <= 0.75 * needed
    predicted = planned.step.plan.predicted.peak_bytes
    assert planned.step.measured.peak_bytes == pytest.approx(predicted, abs=64)


@pytest.mark.parametrize(
    "plan", [CHECKPOINTED, [ss.Precision("bf16")]], ids=lambda plan: type(plan[0]).__name__
)
def test_resuming_goes_on_to_the_bit(tmp_path: Path, plan: Any) -> None:
    class Killed(Exception):
        pass

    class Kill(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == 7:
                raise Killed

    saved = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 2}
    whole, expected = trained(BudgetTrainer, tmp_path / "a", model(dropout=0.1), plan=plan, **saved)
    with pytest.raises(Killed):
        trained(
            BudgetTrainer, tmp_path / "b", model(dropout=0.1), plan=plan, callbacks=[Kill()],
            **saved,
        )  # fmt: skip
    assert (tmp_path / "b" / "checkpoint-6" / PLAN_FILE).exists()
    again, found = trained(
        BudgetTrainer, tmp_path / "b", model(1, dropout=0.1), plan=plan, resume=True, **saved
    )
    assert again.state.global_step == whole.state.global_step
    assert [line.get("loss") for line in found] == [line.get("loss") for line in expected]
    assert same_weights(whole, again)


def test_a_plan_of_16_bits_is_clipped_logged_and_trained(tmp_path: Path) -> None:
    _, expected = trained(transformers.Trainer, tmp_path / "a", optim="sgd")
    planned, found = trained(
        BudgetTrainer, tmp_path / "b", plan=[ss.Precision("fp16")], optim="sgd"
    )
    for one, other in zip(expected[:4], found, strict=False):
        assert other["loss"] == pytest.approx(one["loss"], rel=2e-2)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=5e-2)
    assert next(planned.model.parameters()).dtype is torch.float16
    assert float(planned.step.loss_scale) > 1


def test_early_stopping_and_the_best_model(tmp_path: Path) -> None:
    given = {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "num_train_epochs": 9,
        "learning_rate": 0.3,
    }  # fmt: skip
    stop = transformers.EarlyStoppingCallback(early_stopping_patience=1)
    plain, expected = trained(transformers.Trainer, tmp_path / "a", callbacks=[stop], **given)
    stop = transformers.EarlyStoppingCallback(early_stopping_patience=1)
    planned, found = trained(
        BudgetTrainer, tmp_path / "b", callbacks=[stop], plan=CHECKPOINTED, **given
    )
    assert found == expected
    assert plain.state.global_step == planned.state.global_step < 54
    assert same_weights(plain, planned)


def test_training_again_goes_on(tmp_path: Path) -> None:
    def twice(kind: Any, folder: Path, **own: Any) -> Any:
        trainer = kind(model=model(), args=arguments(folder), train_dataset=dataset(), **own)
        trainer.train()
        trainer.train()
        return trainer

    plain = twice(transformers.Trainer, tmp_path / "a")
    assert same_weights(plain, twice(BudgetTrainer, tmp_path / "b", plan=CHECKPOINTED))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"gradient_checkpointing": True}, "gradient_checkpointing"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"torch_compile": True}, "torch_compile"),
    ],
)
def test_options_it_cannot_keep_are_named_before_training(
    tmp_path: Path, changed: dict[str, Any], told: str
) -> None:
    with pytest.raises(ss.InputError, match=told):
        BudgetTrainer(
            model=model(), args=arguments(tmp_path, **changed), train_dataset=dataset(),
            budget="1 GB",
        )  # fmt: skip


def test_a_budget_or_a_plan_is_needed(tmp_path: Path) -> None:
    for own in ({}, {"budget": "1 GB", "plan": CHECKPOINTED}):
        with pytest.raises(ss.InputError, match="a budget or a plan"):
            BudgetTrainer(model=model(), args=arguments(tmp_path), **own)


def test_a_training_step_of_another_kind_is_refused(tmp_path: Path) -> None:
    class Own(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = model(**inputs).loss
            loss.backward()
            return loss.detach()

    class Both(Budgeted, Own):
        pass

    with pytest.raises(ss.InputError, match="0 backward passes"):
        trained(Both, tmp_path, plan=CHECKPOINTED)


@pytest.mark.slow
def test_on_two_ranks_of_torchrun(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    script = Path(__file__).with_name("trainers_on_two_ranks.py")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script],
        env={
            **os.environ, "PYTHONPATH": f"{root / 'src'}:{root / 'tests'}", "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true", "TMPDIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert "world of 2: all the same" in done.stdout, done.stderr[-3000:]


def test_updates_within_the_backward_pass_are_not_a_trainers(tmp_path: Path) -> None:
    release = ss.Plan.from_dict({"gradient_release": {}})
    with pytest.raises(ss.InputError, match="updates after the backward pass"):
        trained(BudgetTrainer, tmp_path, plan=release)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("given", [{}, {"bf16": True}, {"fp16": True, "optim": "sgd"}])
def test_on_a_gpu_the_budget_is_what_the_card_takes(tmp_path: Path, given: Any) -> None:
    """Reserved memory stays within it; a plan without microbatches logs what the Trainer does."""
    both = {"use_cpu": False, "gradient_accumulation_steps": 2, **given}
    _, expected = trained(transformers.Trainer, tmp_path / "a", **both)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    planned, found = trained(BudgetTrainer, tmp_path / "b", budget="1 GB", **both)
    assert torch.cuda.max_memory_reserved() <= 10**9
    assert planned.state.global_step == 6
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, rel=2e-2)


def noting(kind: Any) -> Any:
    """A trainer of the user's own that notes and logs how often its guess was right."""

    class Noting(kind):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._metrics = {"train": {"accuracy": []}, "eval": {}}
            super().__init__(*args, **kwargs)

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs["return_outputs"] = True
            loss, outputs = super().compute_loss(model, inputs, *args, **kwargs)
            labels = inputs["labels"][:, 1:]
            right = (outputs.logits[:, :-1].argmax(-1) == labels).sum() / labels.ne(-100).sum()
            self._metrics["train"]["accuracy"].append(right.item())
            if self.state.global_step % 2:
                self.log({"right": right.item()})
            return loss

    return Noting


def test_what_microbatches_note_and_log_is_of_the_whole_batch(tmp_path: Path) -> None:
    given = {"max_steps": 4, "learning_rate": 1e-3}
    plain, expected = trained(noting(transformers.Trainer), tmp_path / "a", **given)
    parts, found = trained(
        noting(BudgetTrainer), tmp_path / "b", plan=[ss.Microbatching(3)], **given
    )
    noted = [trainer._metrics["train"]["accuracy"] for trainer in (plain, parts)]
    assert noted[1] == pytest.approx(noted[0], rel=1e-5)
    assert [sorted(line) for line in found] == [sorted(line) for line in expected]
    for one, other in zip(expected, found, strict=True):
        assert other.get("right", 0.0) == pytest.approx(one.get("right", 0.0), rel=1e-5)
    assert sum("right" in line for line in found) == 2


def telling(kind: Any) -> Any:
    """A trainer of the user's own that logs losses: shares of a sum, where items are counted."""

    class Telling(kind):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            self.log({"in loss": loss.item()})
            return loss

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            self.log({"in step": 2 * loss.item()})
            return loss

    return Telling


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_loss_that_microbatches_log_is_that_of_the_whole_batch(
    tmp_path: Path, accumulated: int
) -> None:
    given = {"max_steps": 3, "gradient_accumulation_steps": accumulated}
    _, expected = trained(telling(transformers.Trainer), tmp_path / "a", **given)
    budget = {"plan": [ss.Microbatching(3)], **given}
    _, found = trained(telling(BudgetTrainer), tmp_path / "b", **budget)
    assert len(found) == len(expected)
    for one, other in zip(expected, found, strict=True):
        told = {name: value for name, value in one.items() if name.startswith("in ")}
        assert {name: other.get(name) for name in told} == pytest.approx(told, rel=1e-5)


def test_what_a_training_step_returns_is_logged(tmp_path: Path) -> None:
    class Returning(transformers.Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().training_step(*args, **kwargs) / 4

    class Planned(Budgeted, Returning):
        pass

    given = {"max_steps": 3}
    _, expected = trained(Returning, tmp_path / "a", **given)
    _, found = trained(Planned, tmp_path / "b", plan=CHECKPOINTED, **given)
    assert found == expected
    _, found = trained(Planned, tmp_path / "c", plan=[ss.Microbatching(3)], **given)
    losses = [[line["loss"] for line in lines if "loss" in line] for lines in (expected, found)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


class Distilled(transformers.Trainer):
    """Counts its batches, and asks `self.model`, switched for a moment, as TRL does for DPO."""

    batches = 0

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        returned = super().training_step(*args, **kwargs)
        self.batches += 1
        return returned

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        weight = 1.0 / (1 + self.batches)
        found = model(input_ids=inputs["input_ids"]).logits
        held = [p for p in self.model.parameters() if p.requires_grad]
        for parameter in held:
            parameter.requires_grad_(False)
        reference = self.model(input_ids=inputs["input_ids"][:, :4]).logits
        assert float(reference.detach().abs().max()) < 1e3 and not reference.requires_grad
        for parameter in held:  # not after an error, as a context of PEFT's
            parameter.requires_grad_(True)
        return weight * (found[:, :4] - 0.9 * reference).square().mean()


class BudgetDistilled(Budgeted, Distilled):
    pass


@pytest.mark.parametrize(
    "own", [{"plan": [ss.Microbatching(4, units="examples")]}, {"budget": "1 GB"}]
)
def test_a_trainer_that_counts_and_asks_its_own_model(tmp_path: Path, own: Any) -> None:
    plain, expected = trained(Distilled, tmp_path / "a")
    planned, found = trained(BudgetDistilled, tmp_path / "b", **own)
    assert planned.batches == plain.batches == plain.state.global_step
    for one, other in zip(expected[:-1], found[:-1], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-3)
    assert all(p.requires_grad for p in planned.model.parameters())


class Held(torch.nn.Module):
    """A loss that holds the model, as those of sentence-transformers do."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> torch.Tensor:
        return self.model(**inputs).loss


class OfItsOwn(transformers.Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses = {"only": Held(self.model)}

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return self.losses["only"](inputs)


class BudgetOfItsOwn(Budgeted, OfItsOwn):
    pass


def test_a_loss_that_holds_the_model_is_planned(tmp_path: Path) -> None:
    plain, expected = trained(OfItsOwn, tmp_path / "a", max_steps=3)
    planned, found = trained(BudgetOfItsOwn, tmp_path / "b", max_steps=3, budget="1 GB")
    assert found == expected and same_weights(plain, planned)
    assert planned.losses["only"].model is planned.model


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 1))

    def forward(self, values: torch.Tensor, labels: torch.Tensor) -> Any:
        scores = self.layers(values)[:, 0]
        return {"loss": torch.nn.functional.mse_loss(scores, labels), "logits": scores}


def test_evaluation_gets_the_type_of_the_plan(tmp_path: Path) -> None:
    """Of inputs; labels are for the metrics, too."""
    drawn = torch.Generator().manual_seed(1)
    rows = [
        {"values": torch.randn(6, generator=drawn), "labels": torch.rand((), generator=drawn)}
        for _ in range(16)
    ]
    seen: list[Any] = []
    trainer = BudgetTrainer(
        model=Classifier(), args=arguments(tmp_path, max_steps=2, eval_strategy="epoch"),
        train_dataset=rows, eval_dataset=rows, plan=[ss.Precision("bf16")], allow="near",
        compute_metrics=lambda found: seen.append(found.label_ids) or {"n": len(found.label_ids)},
    )  # fmt: skip
    trainer.train()
    assert torch.equal(torch.tensor(seen[-1]), torch.stack([row["labels"] for row in rows]))
