"""The public names: a user's own model, loss and optimizer, and what a profile promises."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoestring as ss
from shoestring.lab.models import builtin
from work import calls

SOURCE = Path(__file__).parents[2] / "src"
BATCH = 8


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The user's own, as the design's example has it."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def small_model() -> nn.Module:
    """Real weights, one BatchNorm, two convolutions and a classifier."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, padding=1, bias=False),
        nn.Flatten(),
        nn.Linear(6 * 8 * 8, 10),
    )


def small_batch() -> tuple[Tensor, Tensor]:
    """Eight images of 8 × 8 and their labels."""
    return torch.randn(BATCH, 3, 8, 8), torch.randint(10, (BATCH,))


def predict(**settings: Any) -> ss.MemoryProfile:
    """A profile of the small model, with SGD as in the report."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    return ss.profile(model, small_batch(), loss=loss, optimizer=optimizer, **settings)


def test_profiles_compare_by_value() -> None:
    one = predict()
    assert one == ss.MemoryProfile.from_dict(one.to_dict())
    assert one != predict(techniques=[ss.Microbatching(2)])


def test_the_example_of_the_design() -> None:
    model, batch = small_model(), small_batch()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    predicted = ss.profile(model, batch, loss=loss, optimizer=optimizer)

    parameters = 3 * 4 * 9 + 2 * 4 + 4 * 6 * 9 + 6 * 8 * 8 * 10 + 10
    roles = {str(role): size for role, size in predicted.bytes_by_role.items()}
    assert roles["model"] == roles["gradient"] == roles["optimizer_state"] == 4 * parameters
    # Inputs of both convolutions, of BatchNorm and of the classifier; one bit a ReLU input.
    kept = BATCH * (4 * (3 + 4 + 4 + 6) * 64 + 4 * 64 // 8)
    assert predicted.stored_activation_bytes == kept + BATCH * (4 * 10 + 8)
    assert str(predicted).endswith(f"peak {predicted.peak_bytes / 1000:.1f} KB")
    assert optimizer.state == {}
    assert all(p.grad is None for p in model.parameters())
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)

    on_device = ss.profile(model, batch, loss=loss, optimizer=optimizer, accounting="device")
    measured = ss.measure(model, batch, loss=loss, optimizer=optimizer)
    assert measured.device == on_device.device == "cpu"
    assert measured.peak_bytes == pytest.approx(on_device.peak_bytes, rel=0.03)
    assert sum(measured.bytes_by_role.values()) == measured.peak_bytes


def test_str_names_the_parts_of_the_report() -> None:
    known = builtin("wrn-28-2")
    predicted = ss.profile(known.build(), known.batch(100), loss=known.loss, optimizer="sgd")
    shown = "model 5.8 MB · optimizer 11.7 MB · activations 387.3 MB · peak 404.8 MB"
    assert str(predicted) == shown
    assert predicted.activation_bytes == 387_328_000


def test_a_batch_may_be_any_structure() -> None:
    def named(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["more"][0])

    images, labels = small_batch()
    model = small_model()
    nested = ss.profile(model, {"x": images, "more": [labels], "note": "a word"}, loss=named)
    plain = ss.profile(model, (images, labels), loss=loss)
    assert nested.as_dict() == plain.as_dict()


NEUTRAL: dict[str, list[Any]] = {
    "density": [ss.Sparsity(1.0)],
    "precision": [ss.Precision("fp32")],
    "microbatch": [ss.Microbatching(BATCH)],
    "checkpoint": [ss.Checkpointing("none")],
    "all": [
        ss.Sparsity(1.0),
        ss.Precision("fp32"),
        ss.Microbatching(BATCH),
        ss.Checkpointing("none"),
    ],
}


@pytest.mark.parametrize("name", NEUTRAL)
@pytest.mark.parametrize("accounting", ["fundamental", "device"])
def test_neutral_settings_change_nothing(name: str, accounting: str) -> None:
    plain = predict(accounting=accounting)
    neutral = predict(accounting=accounting, techniques=NEUTRAL[name])
    assert neutral.as_dict() == plain.as_dict()
    assert np.array_equal(neutral.timeline.bytes_by_role, plain.timeline.bytes_by_role)
    assert neutral.timeline.labels == plain.timeline.labels


def test_techniques_together() -> None:
    """Each alone is smaller than none; together they are smaller than each."""
    alone = [
        ss.Sparsity(0.25),
        ss.Precision("fp16"),
        ss.Microbatching(2),
        ss.Checkpointing("no-bn"),
    ]
    plain = predict().peak_bytes
    peaks = [predict(techniques=[technique]).peak_bytes for technique in alone]
    together = predict(techniques=alone).peak_bytes
    assert together < min(peaks)
    assert max(peaks) < plain


def test_techniques_by_hand() -> None:
    """FP16 halves all but BatchNorm's own numbers, which stay in FP32."""
    plain, half = predict(), predict(techniques=[ss.Precision("fp16")])
    norm = 2 * 4
    roles = {str(role): size for role, size in half.bytes_by_role.items()}
    total = {str(role): size for role, size in plain.bytes_by_role.items()}
    for role in ("model", "gradient", "optimizer_state"):
        assert roles[role] == (total[role] - 4 * norm) // 2 + 4 * norm
    sparse = predict(techniques=[ss.Sparsity(0.5)])
    # The second convolution alone: 108 of 216 values, 6 bits a column, 7 pointers of 4 bytes.
    values, index = 108, 108 * 6 // 8 + 7 * 4
    assert sparse.sparsifiable_parameters == 216
    roles = {str(role): size for role, size in sparse.bytes_by_role.items()}
    assert roles["model"] == total["model"] - 4 * (216 - values) + index
    assert roles["gradient"] == total["gradient"] - 4 * (216 - values)


def test_density_without_anything_to_sparsify_warns() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 10))
    with pytest.warns(ss.NoEffectWarning, match=r"density 0\.5: the model has no tensor"):
        sparse = ss.profile(model, small_batch(), loss=loss, techniques=[ss.Sparsity(0.5)])
    assert sparse.as_dict() == ss.profile(model, small_batch(), loss=loss).as_dict()


@pytest.mark.parametrize(
    ("accounting", "device"), [("fundamental", "cpu"), ("device", "cpu"), ("device", "cuda")]
)
def test_the_timeline_has_one_row_an_instant(accounting: str, device: str) -> None:
    predicted = predict(accounting=accounting, device=device)
    timeline = predicted.timeline
    assert timeline.bytes_by_role.shape == (len(timeline.labels), len(predicted.bytes_by_role))
    assert (timeline.bytes_by_role >= 0).all()
    assert timeline.totals.max() == predicted.peak_bytes
    assert timeline.totals[timeline.peak_instant] == predicted.peak_bytes
    assert timeline.labels[timeline.peak_instant] == (
        predicted.peak_operation,
        predicted.peak_phase,
        predicted.peak_module,
    )
    assert sum(predicted.bytes_by_role.values()) == predicted.peak_bytes
    assert sum(predicted.bytes_by_module.values()) == predicted.peak_bytes


@pytest.mark.parametrize(
    "technique", [ss.Sparsity(0.5), ss.Precision("fp16"), ss.Checkpointing("no-bn")], ids=str
)
def test_the_device_accounting_is_of_the_planned_step(technique: Any) -> None:
    """What `apply` makes of it is what is measured."""
    model, batch = small_model(), small_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    given: dict[str, Any] = {"loss": loss, "optimizer": optimizer}
    found = ss.profile(model, batch, **given, accounting="device", techniques=[technique])
    step = ss.apply([technique], model, optimizer, loss=loss)
    step(batch)
    assert step.measure(batch).peak_bytes == pytest.approx(found.peak_bytes, rel=0.02)


def test_batch_norm_that_counts_its_batches() -> None:
    """It reads the count on the host, which changes no byte."""
    sizes = []
    for momentum in (0.1, None):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum))
        batch = torch.randn(2, 3, 8, 8)
        made = ss.profile(model, batch, loss=lambda m, b: m(b).mean(), accounting="device")
        sizes.append(made.peak_bytes)
        assert model[1].momentum == momentum
    assert sizes[0] == sizes[1]


def with_lbfgs(model: nn.Module) -> ss.MemoryProfile:
    optimizer = torch.optim.LBFGS(model.parameters())
    return ss.profile(model, small_batch(), loss=loss, optimizer=optimizer)


def test_mistakes_are_value_errors_with_a_way_out() -> None:
    for wrong in (
        lambda: predict(accounting="real"),
        lambda: predict(device="tpu"),
        lambda: predict(accounting="fundamental", device="cuda"),
        lambda: predict(techniques=[ss.Microbatching(3)]),
        lambda: predict(techniques=ss.Precision("fp16")),
        lambda: predict(techniques=["fp16"]),
        lambda: ss.profile(nn.LazyLinear(4), torch.randn(2, 3), loss=lambda m, b: m(b).mean()),
        lambda: with_lbfgs(small_model()),
        lambda: ss.Sparsity(0.0),
        lambda: ss.Precision("fp8"),
        lambda: ss.Checkpointing("sqrt"),
        lambda: ss.Microbatching(0),
    ):
        with pytest.raises(ss.ShoestringError) as caught:
            wrong()
        assert isinstance(caught.value, ValueError)
        assert caught.value.hint


# -- what it costs to ask ----------------------------------------------------------------------


def test_a_profile_is_little_work() -> None:
    """Two traces would be more: one makes 0.56 million calls."""
    known = builtin("wrn-28-2")
    model, batch = known.build(), known.batch(100)

    def work() -> None:
        ss.profile(model, batch, loss=known.loss, optimizer="sgd")

    work()  # what is imported and learned once does not count
    assert calls(work) < 1e6


def python(code: str) -> str:
    """Run code in a process of its own and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_import_adds_little_to_torch() -> None:
    """What it offers is imported when it is first used."""
    code = """
import sys
import torch
before = set(sys.modules)
import shoestring
print(sorted(set(sys.modules) - before))
"""
    assert python(code) == "['shoestring', 'shoestring.errors', 'shoestring.version']\n"


@pytest.mark.slow
def test_seven_billion_parameters_need_no_memory() -> None:
    """Llama 7B from its configuration: 6.7 billion parameters, 4 × 2048 tokens, Adam."""
    pytest.importorskip("transformers")
    code = """
import json, resource
import torch

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def largest_bytes():  # ru_maxrss begins with what the process that forked this one had
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

before = resident_bytes()
import transformers
from shoestring.step.profiling import profile
from shoestring.lab.target import default_loss
from torch._subclasses.fake_tensor import FakeTensorMode

with FakeTensorMode(allow_non_fake_inputs=True):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
        num_attention_heads=32, max_position_embeddings=4096,
    ))
    ids = torch.zeros(4, 2048, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": torch.zeros(4, 2048, dtype=torch.int64)}
found = profile(model, batch, loss=default_loss, optimizer="adam", accounting="device")
print(json.dumps({
    "parameters": found.parameters,
    "model_bytes": found.as_dict()["model_bytes"],
    "peak_bytes": found.peak_bytes,
    "above_torch_bytes": largest_bytes() - before,
}))
"""
    if not Path("/proc/self/statm").exists():
        pytest.skip("resident memory is read from /proc")
    found = json.loads(python(code).splitlines()[-1])
    assert found["parameters"] == 6_738_415_616
    assert found["model_bytes"] == 4 * 6_738_415_616
    assert found["peak_bytes"] > 4 * found["model_bytes"]
    assert found["above_torch_bytes"] < 1.5e9
