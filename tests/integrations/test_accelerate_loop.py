"""A loop with accelerate, with and without a plan; what accelerate wraps is known."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import nn

import shoestring as ss
from techniques.small_models import SMALL

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")

from shoestring.integrations.accelerate import prepare_passes  # noqa: E402
from shoestring.integrations.hosted import library  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of accelerate's own


def trained(accumulated: int, precision: str, **own: Any) -> tuple[nn.Module, list[Any]]:
    torch.manual_seed(0)
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=accumulated, mixed_precision=precision
    )
    small = SMALL["tied"]
    model = small.build()
    for module in model.modules():  # each microbatch would draw masks of its own
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    batches = [small.batch() for _ in range(6)]
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    passes = None
    if own:
        passes = prepare_passes(accelerator, model, optimizer, batches[0], loss=small.loss, **own)
    lines = []
    for batch in batches:
        with accelerator.accumulate(model):
            if passes is None:
                value = small.loss(model, batch)
                accelerator.backward(value)
            else:
                value = passes(batch)
            norm = 0.0
            if accelerator.sync_gradients:
                norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        lines.append((float(value.detach()), norm, optimizer.param_groups[0]["lr"]))
    return model, lines


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("accumulated", [1, 3])
def test_a_lossless_plan_changes_no_bit(accumulated: int, precision: str) -> None:
    model, expected = trained(accumulated, precision)
    plan = [ss.Checkpointing("residual-1")]
    twin, found = trained(accumulated, precision, plan=plan)
    assert found == expected
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    _, found = trained(accumulated, precision, budget="1 GB")
    assert found == expected


def test_microbatches_train_alike() -> None:
    _, expected = trained(2, "no")
    _, found = trained(2, "no", plan=[ss.Microbatching(4)])
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, rel=1e-4)


def test_16_bits_with_a_scale_are_refused() -> None:
    with pytest.raises(ss.InputError, match="cannot clip gradients that fp16 scales"):
        trained(1, "no", plan=[ss.Precision("fp16")])


@pytest.mark.parametrize("name", ["transformers", "lightning", "accelerate"])
def test_a_library_that_is_missing_or_too_old_is_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def missing(_: str) -> str:
        raise metadata.PackageNotFoundError

    module = f"shoestring.integrations.{name}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr("shoestring.integrations.hosted.version", missing)
    with pytest.raises(ss.InputError, match="not installed") as caught:
        __import__(module)
    assert caught.value.hint is not None and "pip install" in caught.value.hint
    monkeypatch.setattr("shoestring.integrations.hosted.version", lambda _: "0.9.1")
    with pytest.raises(ss.InputError, match=r"or later, 0\.9\.1 is installed"):
        __import__(module)


def test_a_new_enough_library_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoestring.integrations.hosted.version", lambda _: "1.10.0rc1")
    with library("anything", "1.9", "hf"):
        pass
    told = pytest.raises(ss.InputError, match="cannot be imported: no such part")
    with told, library("anything", "1.9", "hf"):
        raise ImportError("no such part")
