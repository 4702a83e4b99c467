"""The certificate: it confirms what is lossless, sizes what is not, and catches what is broken."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import shoestring as ss
from shoestring.errors import InputError, NoEffectWarning, VerificationError
from shoestring.techniques import Checkpointing, Microbatching, Precision, Sparsity, Technique
from shoestring.techniques.base import Setup
from shoestring.techniques.claims import Level
from shoestring.techniques.distance import relative_error
from shoestring.techniques.plan import Plan
from shoestring.verification.certificate import Certificate, Comparison
from shoestring.verification.claims import suspicion
from shoestring.verification.verify import verify
from techniques.small_models import SMALL, classify

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
}


def certificate(name: str, chosen: list[Technique], optimizer: str = "sgd") -> Certificate:
    small = SMALL[name]
    torch.manual_seed(0)
    model, batch = small.build(), small.batch()
    return verify(
        chosen, model, [batch], loss=small.loss, optimizer=OPTIMIZERS[optimizer](model), steps=2
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [("cnn", "no-bn"), ("residual", "residual-2*"), ("transformer", "residual-1"), ("mlp", "none")],
)
def test_checkpointing_is_plain_training(name: str, strategy: str, optimizer: str) -> None:
    found = certificate(name, [Checkpointing(strategy)], optimizer)
    assert found.ok
    for comparison in found.comparisons:
        assert comparison.claim is Level.EQUAL
        assert comparison.found in (Level.EQUAL, Level.NONE)
    assert found["buffers"].found is (Level.EQUAL if SMALL[name].has_batch_norm else Level.NONE)
    found.check()
    assert str(found).endswith("verified") and "NOT" not in str(found)


@pytest.mark.filterwarnings("ignore:microbatches. a hook")
@pytest.mark.parametrize("kind", ["made", "added", "counted"])
def test_hooks_on_gradients_are_on_both_sides(kind: str) -> None:
    """In parts, hooks that are not linear give other gradients, which a certificate tells."""
    small = SMALL["mlp"]
    torch.manual_seed(0)
    model, calls = small.build(), []
    first = next(model.parameters())
    if kind == "made":
        first.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    elif kind == "added":
        first.register_post_accumulate_grad_hook(lambda p: p.grad.sign_() is None or None)
    else:
        first.register_hook(lambda g: calls.append(1))
    given: dict[str, Any] = {"loss": small.loss, "optimizer": OPTIMIZERS["sgd"](model), "steps": 1}
    found = verify([Microbatching(3, units="examples")], model, [small.batch()], **given)
    assert all(row.ok for row in found.comparisons) is (kind == "counted") and not calls
    whole = verify([Checkpointing("every-1")], model, [small.batch()], **given)
    assert all(row.ok for row in whole.comparisons)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_microbatches_without_batch_norm_round(optimizer: str) -> None:
    found = certificate("tied", [Microbatching(4)], optimizer)
    assert found.ok
    assert found["loss"].claim is Level.ROUNDING
    assert found["gradients"].claim is found["gradients"].found is Level.ROUNDING
    assert 0 < found["gradients"].error < 1e-5  # type: ignore[operator]
    linear = optimizer == "sgd"
    assert found["parameters"].claim is (Level.ROUNDING if linear else Level.NEAR)
    assert "divides by the gradient" in found["parameters"].why or linear


def test_microbatches_change_what_batch_norm_sees() -> None:
    found = certificate("residual", [Microbatching(2)])
    assert found.ok
    assert found["buffers"].found is found["buffers"].claim is Level.LOSSY
    assert "BatchNorm" in found["buffers"].why
    assert found["random stream"].found is Level.EQUAL
    both = certificate("residual", [Sparsity(0.3), Microbatching(2)])["parameters"].why
    assert "BatchNorm" in both and "density 0.3" in both


def test_microbatches_draw_their_own_masks() -> None:
    found = certificate("transformer", [Microbatching(2)])
    assert found.ok
    assert found["gradients"].claim is found["gradients"].found is Level.ROUNDING
    assert found["random stream"].claim is Level.LOSSY


def test_a_batch_that_is_not_cut_is_plain() -> None:
    found = certificate("cnn", [Microbatching(6)])
    assert all(c.claim is c.found is Level.EQUAL for c in found.comparisons)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_precision_is_near(kind: str, optimizer: str) -> None:
    found = certificate("transformer", [Precision(kind)], optimizer)
    assert found.ok
    for what in ("loss", "gradients", "optimizer state", "parameters"):
        assert found[what].claim is Level.NEAR, what
        assert found[what].found in (Level.ROUNDING, Level.NEAR), what
        assert found[what].bound < {"fp16": 0.1, "bf16": 0.3}[kind]  # type: ignore[operator]
    assert found["random stream"].found is Level.EQUAL


@pytest.mark.parametrize("name", ["cnn", "tied", "lstm"])
def test_sparse_gradients_are_the_dense_ones_at_the_nonzeros(name: str) -> None:
    found = certificate(name, [Sparsity(0.3)])
    assert found.ok
    assert found["gradients"].found in (Level.EQUAL, Level.ROUNDING)
    assert found["parameters"].found is found["parameters"].claim is Level.LOSSY
    assert "density 0.3" in found["parameters"].why


ALL = [Sparsity(0.3), Precision("fp16"), Checkpointing("residual-2*"), Microbatching(2)]


def test_all_four_together() -> None:
    found = certificate("tied", ALL)
    assert found.ok
    assert found["checkpointing"].claim is found["checkpointing"].found is Level.EQUAL
    assert [t.name for t in found.plan.techniques] == [t.name for t in Plan.of(ALL).techniques]
    assert found.plan.loss_units == "1 != -100"
    assert found["gradients"].found in (Level.ROUNDING, Level.NEAR)


def test_the_peak_is_the_predicted_one() -> None:
    found = certificate("residual", [Checkpointing("residual-2*")])
    assert found.peak_ok
    assert found.predicted_peak_bytes == pytest.approx(found.measured_peak_bytes, rel=0.02)
    assert found.measured_peak_bytes < found.plain_peak_bytes


class Drops(nn.Module):
    """Stochastic depth, drawn on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if torch.rand(()) < 0.5 else x + self.inner(x)


@pytest.mark.slow
def test_a_peak_that_is_drawn_is_not_judged() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), *(Drops() for _ in range(6)))
    batch = torch.randn(64, 32)
    said = set()
    for seed in range(4):
        torch.manual_seed(seed)
        found = verify(
            [Checkpointing("residual-1")], model, [batch], loss=lambda m, b: m(b).square().mean(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1), steps=1,
        )  # fmt: skip
        assert found.ok, found
        said.add((found.peak_varies, "not checked: steps differ" in str(found)))
    assert said <= {(True, True), (False, False)}


def test_a_peak_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = certificate("mlp", []).measured_peak_bytes

    @dataclass(frozen=True)
    class Off:
        peak_bytes: int = plain * 103 // 100

    monkeypatch.setattr("shoestring.verification.verify.predict_step", lambda *a, **k: Off())
    found = certificate("mlp", [])
    assert not found.ok and not found.peak_ok
    with pytest.raises(VerificationError, match="peak predicted"):
        found.check()
    assert "BROKEN" in str(found) and "NOT verified" in str(found)


@contextmanager
def other_stream() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(99)
        yield


@dataclass(frozen=True)
class Broken(Checkpointing):
    """Recomputes each block in a way that is not the first one's."""

    contexts: Any = None
    preserve: bool = True

    def apply(self, setup: Setup) -> None:
        for path in self._find(setup.model):
            block = setup.model.get_submodule(path)
            block.forward = self._again(block.forward)

    def _again(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: torch.Tensor) -> Any:
            return checkpoint(
                plain,
                x,
                use_reentrant=False,
                preserve_rng_state=self.preserve,
                context_fn=self.contexts or (lambda: (nullcontext(), nullcontext())),
            )

        return forward


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(x)
        return made * 2 if made.abs().max().item() > 100 else made


def test_a_model_that_reads_a_value_is_compared_all_the_same() -> None:
    model = Reads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = verify(
        [Microbatching(2)],
        model,
        [torch.randn(4, 4)],
        loss=lambda m, b: m(b).mean(),
        optimizer=optimizer,
    )
    assert found.ok and found["gradients"].found is Level.ROUNDING
    unpredicted = replace(found, predicted_peak_bytes=None)
    assert unpredicted.ok and "not predicted" in str(unpredicted)


@pytest.mark.slow
def test_caches_of_keys_do_not_tell_plain_and_planned_apart() -> None:
    """With one, T5 adds in another order; blocks that run again have none."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    batch = {"input_ids": torch.randint(1, 100, (8, 16)), "labels": torch.randint(1, 100, (8, 12))}
    given: dict[str, Any] = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "steps": 1}
    plan = [Checkpointing("residual-1")]
    assert verify(plan, model, [batch], loss=lambda m, b: m(**b).loss, **given).ok
    assert config.use_cache


def test_statistics_that_move_twice_are_caught() -> None:
    """`torch.utils.checkpoint` as it is (pytorch#96136)."""
    found = certificate("residual", [Broken("residual-1")])
    assert not found.ok
    assert found["gradients"].found is Level.EQUAL
    assert found["buffers"].found is Level.LOSSY and not found["buffers"].ok
    with pytest.raises(VerificationError, match="buffers claimed equal, found differs") as raised:
        found.check()
    assert "BatchNorm" in str(raised.value.hint)
    assert "BROKEN" in str(found)


def test_without_microbatches_they_are_no_suspects() -> None:
    broken = Comparison("gradients", Level.EQUAL, Level.LOSSY, 1.0)
    recomputed = Plan([Checkpointing("every-1")])
    both = Plan([Checkpointing("every-1"), Microbatching(2)])
    assert "a loss that does not split" in suspicion(broken, both).why
    assert "a loss" not in suspicion(broken, recomputed).why
    followed = Comparison("parameters", Level.EQUAL, Level.LOSSY, 1.0)
    assert suspicion(followed, both).why == "follows from the above"


def test_a_mask_that_is_drawn_again_is_caught() -> None:
    """From the stream where it is now: it shows in the gradients, and in the stream."""
    found = certificate("transformer", [Broken("residual-1", preserve=False)])
    assert not found.ok
    assert not found["gradients"].ok and not found["random stream"].ok
    assert found["buffers"].ok


def test_a_mask_from_another_stream_is_caught() -> None:
    """The stream goes on as it should (pytorch#190758): the gradients tell."""
    contexts = lambda: (nullcontext(), other_stream())  # noqa: E731
    found = certificate("transformer", [Broken("residual-1", contexts=contexts)])
    assert not found.ok
    assert not found["gradients"].ok and found["random stream"].ok


@pytest.mark.parametrize("with_it", [Precision("fp16"), Microbatching(2), Sparsity(0.3)], ids=str)
def test_broken_recomputation_does_not_hide_behind_a_lossy_part(with_it: Technique) -> None:
    found = certificate("residual", [Broken("residual-1"), with_it])
    assert not found.ok
    assert "checkpointing" in [c.what for c in found.comparisons if not c.ok]


def test_a_loss_that_is_no_mean_is_caught() -> None:
    model = SMALL["mlp"].build()
    data = [SMALL["mlp"].batch()]
    given: dict[str, Any] = {"optimizer": OPTIMIZERS["sgd"](model), "steps": 1}
    loss = lambda m, b: classify(m, b) * len(b[1])  # noqa: E731
    found = verify([Microbatching(2, units="examples")], model, data, loss=loss, **given)
    assert not found["gradients"].ok
    assert "does not split" in found["gradients"].why
    assert verify([Microbatching(2)], model, data, loss=loss, **given).ok  # a sum, which it finds


def quiet_net() -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 4))
    return model, (torch.randn(6, 12), torch.arange(6) % 4)


@pytest.mark.parametrize("beside", [None, Precision("fp16")], ids=str)
def test_a_loss_that_is_no_mean_does_not_hide_behind_a_lossy_part(beside: Any) -> None:
    """Masks and 16 bits: FP64 and shared draws tell."""
    model, batch = quiet_net()
    chosen = [Microbatching(2, units="examples"), *([beside] if beside else [])]
    for right in (True, False):
        found = verify(chosen, model, [batch], optimizer=OPTIMIZERS["sgd"](model),
                       loss=lambda m, b, right=right: classify(m, b) * (1 if right else len(b[1])),
                       steps=1)  # fmt: skip
        assert found.ok is found["gradients"].ok is right
    assert found["gradients"].error == pytest.approx(2 / 3)  # a third of the batch for all of it
    assert "does not split" in found["gradients"].why
    assert found.as_dict()["gradients"]["ok"] is False


def test_noise_in_the_loss_is_compared() -> None:
    model, batch = quiet_net()
    loss = lambda m, b: classify(m, (b[0] + torch.rand_like(b[0]), b[1]))  # noqa: E731
    sgd = OPTIMIZERS["sgd"](model)
    found = verify([Microbatching(2)], model, [batch], loss=loss, optimizer=sgd, steps=2)
    assert found.ok and found["gradients"].found is Level.ROUNDING


def test_what_cannot_be_shared_is_unproven() -> None:
    """Examples that are shuffled for each other: parts have nobody to mix with."""
    model, batch = quiet_net()

    def loss(m: nn.Module, b: Any) -> torch.Tensor:
        mixed = b[0] + 0.5 * b[0][torch.randperm(len(b[0]))]
        return classify(m, (mixed, b[1]))

    given: dict[str, Any] = {"optimizer": OPTIMIZERS["sgd"](model), "loss": loss, "steps": 1}
    plan = [Microbatching(2, units="examples")]
    found = verify(plan, model, [batch], **given)
    assert not found.ok and found["gradients"].found is Level.UNPROVEN
    assert "randperm" in found["gradients"].why and "UNPROVEN" in str(found)
    names = [c.what for c in found.comparisons if c.found is Level.UNPROVEN]
    assert verify(plan, model, [batch], accept=names, **given).ok


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_rounding_is_that_of_autocast(dropout: float) -> None:
    model, batch = quiet_net()
    model[1].p = dropout

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return classify(model, batch)

    found = verify([Microbatching(2)], model, [batch], loss=loss,
                   optimizer=OPTIMIZERS["sgd"](model), steps=1)  # fmt: skip
    lossless = found["gradients"]
    assert found.ok and lossless.claim is lossless.found is Level.ROUNDING
    assert 1e-4 < lossless.error < lossless.bound < 0.08  # type: ignore[operator]


class Biased(nn.Module):
    """Attention with a key bias, whose gradient is zero, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)
        self.none = nn.Parameter(torch.zeros(4, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (self.query(x) @ self.key(x).transpose(1, 2)).softmax(-1)
        return (weights @ x).mean(1) + self.none.sum()


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_a_gradient_that_is_all_rounding_is_no_alarm(kind: str) -> None:
    """Adam turns it into whole steps in 16 bits, and into none in FP32."""
    model, batch = Biased(), (torch.randn(16, 8, 16), torch.arange(16) % 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = [Precision(kind), Microbatching(4)]
    found = verify(plan, model, [batch], loss=classify, optimizer=optimizer, steps=3)
    assert found.ok, str(found)


class Shifted(nn.Module):
    """Adds one small number to all."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.full((1,), 1e-3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


def test_a_gradient_that_is_all_rounding_is_no_alarm_with_a_small_epsilon() -> None:
    """In FP64 it is 1e-16, which a division by 1e-10 makes larger than what is allowed there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), Shifted())

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out = model(batch)
        return ((out - out.mean(1, keepdim=True)).square().sum(1) - 3).square().mean()

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-10)
    batch = torch.randn(6, 8) * 3
    found = verify([Microbatching(1)], model, [batch], loss=loss, optimizer=optimizer, steps=2)
    assert found.ok, str(found)


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_one_number_whose_gradient_is_zero_is_no_alarm(seed: int) -> None:
    """The bias of scores that are compared: now and then plain rounding cancels, too."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    batch = torch.randn(8, 3, 16), torch.arange(8) % 3

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0])[..., 0], batch[1])

    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    made = verify([Microbatching(2)], model, [batch], loss=loss, optimizer=sgd, steps=1)
    assert all(row.ok for row in made.comparisons), made


@pytest.mark.parametrize("wrong", [1.01, 1.1])
def test_autocast_hides_no_wrong_gradient(wrong: float) -> None:
    """Rounding is below 1% here: a gradient that is 1 or 10% wrong is not rounding."""
    model, batch = quiet_net()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return classify(model, batch) * (wrong if len(batch[1]) == 2 else 1)

    found = verify([Microbatching(2, units="examples")], model, [batch], loss=loss,
                   optimizer=OPTIMIZERS["sgd"](model), steps=1)  # fmt: skip
    assert not found.ok and not found["gradients"].ok


def test_nan_is_never_a_pass() -> None:
    """The loss is NaN on both sides; whatever the plan does, nothing is proven."""
    model, batch = quiet_net()
    sgd = OPTIMIZERS["sgd"](model)
    for plan in ([], [Microbatching(2, units="examples")], [Checkpointing("every-1")]):
        found = verify(plan, model, [batch], optimizer=sgd, steps=1,
                       loss=lambda m, b: classify(m, b) * torch.nan)  # fmt: skip
        assert not found.ok and not found["loss"].ok
        assert "NaN" in found["loss"].why


def test_bounds_can_be_set() -> None:
    """Of what is near, and of what is lossy."""
    model, batch = quiet_net()
    given: dict[str, Any] = {"loss": classify, "optimizer": OPTIMIZERS["sgd"](model), "steps": 1}
    strict = verify([Precision("bf16")], model, [batch], near=1e-6, **given)
    assert (not strict.ok and strict["loss"].bound in (1e-6, None)) or not strict["gradients"].ok
    assert verify([Sparsity(0.5)], model, [batch], **given).ok
    assert not verify([Sparsity(0.5)], model, [batch], lossy=1e-3, **given).ok


@pytest.mark.slow
def test_nothing_that_was_given_is_changed() -> None:
    small = SMALL["transformer"]
    torch.manual_seed(0)
    model, data = small.build(), [small.batch()]
    optimizer = OPTIMIZERS["adam"](model)
    ss.apply([], model, optimizer, loss=small.loss)(data[0])  # with state
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    held = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict(), data))
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert verify(ALL, model, data, loss=small.loss, optimizer=optimizer, steps=2).ok
    now = (dict(model.state_dict()), optimizer.state_dict(), data)
    for expected, found in zip(tree_leaves(held), tree_leaves(now), strict=True):
        if isinstance(expected, torch.Tensor):
            assert torch.equal(expected, found)
        else:
            assert expected == found
    assert torch.equal(streams[0], torch.get_rng_state())
    assert streams[1:] == (random.getstate(), np.random.get_state()[1].tolist())


def test_a_batch_that_the_loss_writes_to_is_put_back() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x.mul_(0.9)).square().mean()

    model, x = nn.Linear(4, 3), torch.randn(6, 4)
    before = x.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert ss.verify([], model, [x], loss=loss, optimizer=optimizer, steps=2).ok
    assert torch.equal(x, before)


def test_state_from_before_is_taken_along() -> None:
    """Adam's step count goes on from where it was, on both sides."""
    small = SMALL["mlp"]
    model, batch = small.build(), small.batch()
    optimizer = OPTIMIZERS["adam"](model)
    step = ss.apply([], model, optimizer, loss=small.loss)
    for _ in range(5):
        step(batch)
    found = verify([Checkpointing("every-1")], model, [batch], loss=small.loss, optimizer=optimizer)
    assert found.ok and found["optimizer state"].found is Level.EQUAL


def test_as_plain_values() -> None:
    found = certificate("mlp", [Precision("bf16")]).as_dict()
    assert found["ok"] is True and found["plan"] == {"precision": {"kind": "bf16"}}
    assert found["gradients"]["claimed"] == "near"
    assert found["random_stream"]["found"] == "equal"
    assert type(found["predicted_peak_bytes"]) is type(found["measured_peak_bytes"]) is int


def test_a_setting_without_effect_is_said_once() -> None:
    model = nn.Linear(3, 1)
    with pytest.warns(NoEffectWarning) as said:
        verify([Microbatching(1, simulated=True), Checkpointing("every-1")], model,
               [torch.randn(4, 3)], loss=lambda m, b: m(b).mean(),
               optimizer=OPTIMIZERS["sgd"](model))  # fmt: skip
    assert len(said) == 1


@pytest.mark.parametrize(
    ("batches", "steps", "said"),
    [
        ([], 3, "no batch"),
        ((torch.ones(2, 3), torch.ones(2)), 3, "one batch"),
        ({"x": torch.ones(2, 3)}, 3, "one batch"),
        ([torch.ones(2, 3)], 0, "0 steps"),
        ([torch.ones(2, 5)], 1, "failed on this batch"),
    ],
    ids=str,
)
def test_what_cannot_be_verified(batches: Any, steps: int, said: str) -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(InputError, match=said):
        verify([], model, batches, loss=lambda m, b: m(b).mean(),
               optimizer=OPTIMIZERS["sgd"](model), steps=steps)  # fmt: skip


def test_the_error_is_of_the_worst_tensor() -> None:
    ones = torch.ones(3)
    assert relative_error([(ones, ones)]) == 0
    assert relative_error([(2 * ones, torch.tensor([2.0, 2.0, 2.0 + 3.0**0.5]))]) == pytest.approx(
        0.5
    )
    assert relative_error([(100 * ones, 100 * ones), (2 * ones, 3 * ones)]) == pytest.approx(0.5)
    # A tensor of nothing but rounding is measured on the scale of the others.
    assert relative_error([(100 * ones, 100 * ones), (1e-9 * ones, -1e-9 * ones)]) < 1e-6
    assert relative_error([(ones, ones * float("inf"))]) == float("inf")
    assert relative_error([(ones, torch.ones(4))]) == float("inf")
    assert relative_error([(0 * ones, 0 * ones)]) == 0


def test_sparse_gradients_are_compared() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Linear(8, 4))
    batch, optimizer = torch.arange(12), torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(batch).square().sum()
        return out

    for units, right in (("sum", True), ("examples", False)):
        found = verify([Microbatching(4, units=units)], model, [batch], loss=loss,
                       optimizer=optimizer, steps=2)  # fmt: skip
        assert found["gradients"].ok is right, found


def test_an_optimizer_with_two_epsilons_is_compared() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5))
    optimizer, batch = torch.optim.Adafactor(model.parameters()), torch.randn(16, 8)
    loss = lambda m, b: m(b).square().mean()  # noqa: E731
    assert verify([Microbatching(4)], model, [batch], loss=loss, optimizer=optimizer, steps=1).ok


@pytest.mark.parametrize("kind", ["torch", "numpy", "python"])
def test_generators_of_the_users_own_are_alike_on_both_sides(kind: str) -> None:
    own: Any = {"torch": torch.Generator(), "numpy": np.random.default_rng(0),
                "python": random.Random(0)}[kind]  # fmt: skip
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(16, 8)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(batch.shape, generator=own) if kind == "torch" else own.random()
        out: torch.Tensor = model(batch + noise).square().mean()
        return out

    def state() -> str:
        if kind == "numpy":
            return str(own.bit_generator.state)
        return str(own.getstate() if kind == "python" else own.get_state().tolist())

    before = state()
    assert verify([], model, [batch], loss=loss, optimizer=optimizer, steps=2).ok
    ss.measure(model, batch, loss=loss, optimizer=optimizer)
    ss.profile(model, batch, loss=loss, optimizer=optimizer)
    assert state() == before


@pytest.mark.parametrize("how", ["the loss", "a forward"])
def test_copies_that_train_the_model_itself_are_not_compared(how: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5))
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(16, 8)
    if how == "a forward":  # a dict that a function holds may be anyone's: it is not copied
        held = {"before": model[0].forward}
        model[0].forward = lambda x: 0.9 * held["before"](x)

    def loss(given: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = (given if how == "a forward" else model)(batch).square().mean()
        return out

    with pytest.raises(InputError, match="a copy of the model trains parameters of the model"):
        verify([Microbatching(4)], model, [batch], loss=loss, optimizer=optimizer)
    assert model[0].weight.grad is None


def test_infinite_parameters_are_never_what_was_claimed() -> None:
    for claim in (Level.NEAR, Level.LOSSY):
        for what in ("parameters", "gradients"):
            assert not Comparison(what, claim, Level.LOSSY, float("inf")).ok
            assert not Comparison(what, claim, Level.LOSSY, float("nan")).ok
            assert Comparison(what, claim, Level.LOSSY, 3.0).ok
            assert not Comparison(what, claim, Level.LOSSY, 3.0, 0.1).ok
    unproven = Comparison("gradients", Level.LOSSY, Level.UNPROVEN, None)
    assert not unproven.ok


@pytest.mark.slow
def test_tf32_set_by_its_newer_name_stays_as_it_was() -> None:
    """PyTorch refuses to read the older name then; in a process of its own, since it stays so."""
    code = """
import torch
import shoestring as ss
torch.backends.cuda.matmul.fp32_precision = "tf32"
torch.backends.cudnn.conv.fp32_precision = "tf32"
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = lambda model, batch: model(batch).mean()
batch = torch.randn(64, 64)
assert ss.verify([ss.Microbatching(2)], model, [batch], loss=loss, optimizer=optimizer, steps=1).ok
print(torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout == "tf32 tf32\n", ran.stderr


@pytest.mark.parametrize(
    "odd",
    [{"plan": 3}, {"batches": 3}, {"steps": "2"}, {"steps": 1.5}, {"near": "x"}, {"near": -1},
     {"lossy": float("nan")}, {"accept": 3}],
    ids=str,
)  # fmt: skip
def test_odd_arguments_are_one_line(odd: dict[str, Any]) -> None:
    model = nn.Linear(3, 2)
    given: dict[str, Any] = {
        "plan": [], "model": model, "batches": [torch.ones(2, 3)],
        "loss": lambda m, b: m(b).mean(), "optimizer": OPTIMIZERS["sgd"](model), **odd,
    }  # fmt: skip
    with pytest.raises(InputError):
        verify(**given)


def test_the_graph_behind_a_batch_stays() -> None:
    given = torch.ones(4, 3, requires_grad=True)
    batch, model = (2 * given).exp(), nn.Linear(3, 2)
    loss = lambda m, b: m(b).square().mean()  # noqa: E731
    assert verify([], model, [batch], loss=loss, optimizer=OPTIMIZERS["sgd"](model), steps=2).ok
    assert given.grad is None
    loss(model, batch).backward()
    assert given.grad is not None


def test_a_lazy_layer_is_one_line() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    given: dict[str, Any] = {
        "loss": lambda m, b: m(b).mean(), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }  # fmt: skip
    with pytest.raises(InputError, match="a lazy layer has no shape yet"):
        verify([], model, [torch.ones(2, 4)], **given)
    with pytest.raises(InputError, match="a lazy layer has no shape yet"):
        ss.plan(model, torch.ones(2, 4), budget="1 MB", **given)
    with pytest.raises(InputError, match="a lazy layer has no shape yet"):
        ss.apply([], model, given["optimizer"], loss=given["loss"])


def test_a_model_without_values_is_one_line() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    given: dict[str, Any] = {
        "loss": lambda m, b: m(b).mean(), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }  # fmt: skip
    with pytest.raises(InputError, match="weights have no values"):
        verify([], model, [torch.ones(2, 4, device="meta")], **given)
    with pytest.raises(InputError, match="weights have no values"):
        ss.apply([], model, **given)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_what_a_pass_left_in_a_module_is_copied_without_its_graph() -> None:
    """The weight that the older weight_norm computes cannot be copied otherwise."""
    model, x = nn.Sequential(nn.utils.weight_norm(nn.Linear(16, 16)), nn.Tanh()), torch.ones(8, 16)
    given: dict[str, Any] = {
        "loss": lambda m, b: m(b).square().mean(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    given["loss"](model, x).backward()
    assert verify([ss.Microbatching(4)], model, [x], **given).ok
    predicted = ss.profile(model, x, accounting="device", **given)
    assert predicted.peak_bytes == ss.measure(model, x, **given).peak_bytes


class Ascends(torch.optim.SGD):
    """As SAM: it takes two gradients."""

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "requires a closure"


def test_an_optimizer_that_asks_for_a_closure_is_named() -> None:
    model, x = nn.Linear(4, 2), torch.ones(2, 4)
    given: dict[str, Any] = {
        "loss": lambda m, b: m(b).mean(), "optimizer": Ascends(model.parameters(), lr=0.1),
    }  # fmt: skip
    told = "runs the loss by itself, several times a step"
    with pytest.raises(InputError, match=told):
        ss.apply([], model, **given)(x)
    with pytest.raises(InputError, match=told):
        ss.plan(model, x, budget="1 MB", **given)
    with pytest.raises(InputError, match=told):
        verify([], model, [x], **given)
