"""Lightning's real Trainer with and without a plan: the same losses, updates, logs and files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoestring as ss

lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning")

from shoestring.integrations.lightning import BudgetCallback  # noqa: E402
from techniques.small_models import Attention  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the Trainer's own
CHECKPOINTED = [ss.Checkpointing("residual-1")]


class Module(lightning.LightningModule):
    def __init__(self, dropout: float = 0.0, manual: bool = False, sgd: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = not manual
        self.embedding, self.sgd = nn.Embedding(50, 32), sgd
        self.layers = nn.ModuleList(Attention(32, dropout) for _ in range(3))
        self.head = nn.Linear(32, 50)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch: Any, number: int) -> Any:
        words, labels = batch
        scores = self(words)
        loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"right": (scores.argmax(-1) == labels).float().mean()}, prog_bar=True)
        assert self.trainer.max_epochs  # some ask for it
        return {"loss": loss}

    def validation_step(self, batch: Any, number: int) -> None:
        words, labels = batch
        self.log("val_loss", F.cross_entropy(self(words).flatten(0, 1), labels.flatten()))

    def configure_optimizers(self) -> Any:
        kind: Any = torch.optim.SGD if self.sgd else torch.optim.AdamW
        optimizer = kind(self.parameters(), lr=3e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Noted(lightning.Callback):
    """Every batch: what was logged, and what the loop counts."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *others: Any) -> None:
        lines = {k: float(v) for k, v in trainer.callback_metrics.items()}
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        output = float(outputs["loss"])
        self.lines.append({**lines, "global": trainer.global_step, "lr": rate, "output": output})


def fitted(
    folder: Path,
    *callbacks: Any,
    module: Any = None,
    resume: Any = None,
    shuffle: bool = True,
    **given: Any,
) -> tuple[Any, Any, list[Any]]:
    torch.manual_seed(0)
    made = Module() if module is None else module
    words = torch.randint(50, (40, 12), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(words, words.roll(1, 1))
    noted = Noted()
    trainer = lightning.Trainer(
        **{
            "accelerator": "cpu", "max_epochs": 2, "logger": False, "enable_progress_bar": False,
            "enable_model_summary": False, "enable_checkpointing": False, "log_every_n_steps": 1,
            "default_root_dir": folder, "gradient_clip_val": 0.3, **given,
        },
        callbacks=[noted, *callbacks],
    )  # fmt: skip
    loader = DataLoader(data, batch_size=8, shuffle=shuffle)
    trainer.fit(made, loader, DataLoader(data, batch_size=20), ckpt_path=resume)
    return trainer, made, noted.lines


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"accumulate_grad_batches": 3, "gradient_clip_val": None},
        {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.01},
        {"max_steps": 4, "max_epochs": 99},
        {"precision": "bf16-mixed"},
    ],
    ids=lambda given: "-".join(given) or "default",
)
def test_a_lossless_plan_changes_no_bit(tmp_path: Path, given: dict[str, Any]) -> None:
    plain, model, expected = fitted(tmp_path / "a", module=Module(0.1), **given)
    callback = BudgetCallback(plan=CHECKPOINTED)
    planned, twin, found = fitted(tmp_path / "b", callback, module=Module(0.1), **given)
    assert found == expected
    assert planned.global_step == plain.global_step > 0
    assert ("val_loss" in found[-1]) == ("max_steps" not in given)
    assert same(model, twin)
    assert callback.step is not None and callback.step.plan.short() == "residual-1"


def test_accumulation_that_changes_between_epochs_changes_no_bit(tmp_path: Path) -> None:
    def scheduled() -> Any:
        return lightning.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})

    plain, model, expected = fitted(tmp_path / "a", scheduled())
    planned, twin, found = fitted(
        tmp_path / "b", scheduled(), BudgetCallback(plan=CHECKPOINTED)
    )  # fmt: skip
    assert found == expected and same(model, twin)
    assert planned.global_step == plain.global_step


def test_a_budget_holds_where_batches_accumulate_later(tmp_path: Path) -> None:
    """Gradients that wait from the second epoch on are not the step's to use."""
    scheduled = lightning.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})
    later, now = BudgetCallback("1 MB"), BudgetCallback("1 MB")
    fitted(tmp_path / "a", later, scheduled, max_epochs=1)
    fitted(tmp_path / "b", now, max_epochs=1, accumulate_grad_batches=2)
    assert later.step is not None and now.step is not None
    assert later.step.plan.predicted.peak_bytes == now.step.plan.predicted.peak_bytes


@pytest.mark.parametrize("accumulated", [1, 2])
def test_microbatches_train_and_log_alike(tmp_path: Path, accumulated: int) -> None:
    given = {"accumulate_grad_batches": accumulated}
    _, _, expected = fitted(tmp_path / "a", module=Module(sgd=True), **given)
    callback = BudgetCallback(plan=[ss.Microbatching(3)])
    _, _, found = fitted(tmp_path / "b", callback, module=Module(sgd=True), **given)
    assert len(found) == len(expected)
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, rel=1e-4)


class Summed(Module):
    """Its loss is a sum over the batch."""

    def training_step(self, batch: Any, number: int) -> Any:
        words, labels = batch
        scores = self(words)
        loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum") / 96
        self.log("train_loss", loss)
        self.log("right", (scores.argmax(-1) == labels).float().mean())
        return loss


def test_a_summed_loss_is_logged_as_the_sum_and_a_mean_by_examples(tmp_path: Path) -> None:
    _, _, expected = fitted(tmp_path / "a", module=Summed(sgd=True))
    callback = BudgetCallback(plan=[ss.Microbatching(3)])
    _, _, found = fitted(tmp_path / "b", callback, module=Summed(sgd=True))
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, rel=1e-4)


class Counting(Module):
    """Its loss weighs less with every batch that it counted itself."""

    seen = 0

    def training_step(self, batch: Any, number: int) -> Any:
        loss = super().training_step(batch, number)["loss"] / (1 + self.seen)
        self.seen += 1
        return loss


@pytest.mark.parametrize(
    "own", [{"plan": [ss.Microbatching(3, units="examples")]}, {"budget": "1 GB"}]
)
def test_microbatches_count_as_one_batch(tmp_path: Path, own: Any) -> None:
    _, plain, expected = fitted(tmp_path / "a", module=Counting(sgd=True))
    _, module, found = fitted(tmp_path / "b", BudgetCallback(**own), module=Counting(sgd=True))
    assert module.seen == plain.seen == 10
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, rel=1e-4)


def test_a_budget_holds_and_the_model_is_given_back(tmp_path: Path) -> None:
    _, model, expected = fitted(tmp_path / "a")
    words = torch.randint(50, (8, 12))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    needed = ss.measure(model, (words, words), loss=loss, optimizer="adamw").peak_bytes
    callback = BudgetCallback(int(0.8 * needed))
    forwards = [type(m).forward for m in model.modules()]
    trainer, twin, found = fitted(tmp_path / "b", callback)
    assert callback.step is not None and callback.step.plan.short() != "plain"
    assert callback.step.measured is not None
    assert callback.step.measured.peak_bytes <= 0.8 * needed
    assert [type(m).forward for m in twin.modules()] == forwards
    for where in (trainer.strategy, trainer.strategy.precision_plugin, twin):
        assert not {"training_step", "backward", "optimizer_zero_grad", "log"} & vars(where).keys()
    if "microbatch" not in callback.step.plan.short():
        assert found == expected


@pytest.mark.parametrize(
    "plan", [CHECKPOINTED, [ss.Precision("bf16")]], ids=lambda plan: type(plan[0]).__name__
)
def test_resuming_goes_on_to_the_bit(tmp_path: Path, plan: Any) -> None:
    """In order: Lightning saves no random streams."""
    whole, model, expected = fitted(tmp_path / "a", BudgetCallback(plan=plan), shuffle=False)
    first, _, _ = fitted(
        tmp_path / "b", BudgetCallback(plan=plan), max_steps=5, max_epochs=-1, shuffle=False
    )
    first.save_checkpoint(tmp_path / "half.ckpt")
    module = Module()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    again, twin, found = fitted(
        tmp_path / "c", BudgetCallback(plan=plan), module=module, resume=tmp_path / "half.ckpt",
        shuffle=False,
    )  # fmt: skip
    assert again.global_step == whole.global_step
    assert [line["output"] for line in found] == [line["output"] for line in expected[5:]]
    assert same(model, twin)


def test_early_stopping(tmp_path: Path) -> None:
    def stop() -> Any:
        return lightning.callbacks.EarlyStopping("val_loss", patience=1, min_delta=10.0)

    plain, _, expected = fitted(tmp_path / "a", stop(), max_epochs=9)
    planned, _, found = fitted(
        tmp_path / "b", stop(), BudgetCallback(plan=CHECKPOINTED), max_epochs=9
    )
    assert found == expected
    assert plain.current_epoch == planned.current_epoch < 9


def test_16_bits_are_clipped_by_the_plain_norm(tmp_path: Path) -> None:
    _, _, expected = fitted(tmp_path / "a", module=Module(sgd=True))
    callback = BudgetCallback(plan=[ss.Precision("fp16")])
    _, twin, found = fitted(tmp_path / "b", callback, module=Module(sgd=True))
    for one, other in zip(expected, found, strict=True):
        assert other["output"] == pytest.approx(one["output"], rel=2e-2)
    assert next(twin.parameters()).dtype is torch.float16


def test_what_it_cannot_keep_is_named_before_training(tmp_path: Path) -> None:
    with pytest.raises(ss.InputError, match="manual optimization"):
        fitted(tmp_path, BudgetCallback("1 GB"), module=Module(manual=True), gradient_clip_val=None)
    with pytest.raises(ss.InputError, match="a budget or a plan"):
        BudgetCallback()


class Normalized(lightning.LightningModule):
    """Images rather than words: batches of floating-point numbers, and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def training_step(self, batch: Any, number: int) -> Any:
        return F.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("val_loss", F.cross_entropy(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def normalized(folder: Path, *callbacks: Any, epochs: int) -> tuple[Any, Any]:
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 6, generator=drawn), torch.arange(24) % 3)
    module, loader = Normalized(), DataLoader(data, batch_size=8)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=epochs, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
        callbacks=[*callbacks],
    )  # fmt: skip
    trainer.fit(module, loader, loader)
    return trainer, module


def test_an_epoch_for_statistics_alone_moves_no_weight(tmp_path: Path) -> None:
    """Averaged weights with BatchNorm: Lightning runs one more epoch, without backward passes."""

    def averaging() -> Any:
        return lightning.callbacks.StochasticWeightAveraging(1e-2, swa_epoch_start=1)

    _, expected = normalized(tmp_path / "a", averaging(), epochs=2)
    plan = [ss.Checkpointing("per-block", ("layers.0",), ("recompute",))]
    _, found = normalized(tmp_path / "b", averaging(), BudgetCallback(plan=plan), epochs=2)
    assert same(expected, found)


def test_evaluation_gets_the_type_of_the_plan(tmp_path: Path) -> None:
    callback = BudgetCallback(plan=[ss.Precision("bf16")], allow="near")
    trainer, module = normalized(tmp_path, callback, epochs=1)
    assert module.layers[0].weight.dtype is torch.bfloat16
    assert trainer.callback_metrics["val_loss"].isfinite()
    again = trainer.validate(
        module, DataLoader(TensorDataset(torch.randn(4, 6), torch.arange(4) % 3))
    )
    assert again[0]["val_loss"] > 0
    assert "convert_input" not in vars(trainer.precision_plugin)
