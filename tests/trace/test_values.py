"""Models may ask what follows from the batch's whole numbers, and are answered as in training."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shoestring import Checkpointing, Microbatching, apply, measure, profile, verify
from shoestring.errors import TraceError
from shoestring.memory.device import device_timeline
from shoestring.step.trace_step import trace_plan
from shoestring.techniques.plan import Plan
from shoestring.trace.fakes import fake_batch
from shoestring.trace.tracing import trace_model
from tiers import slow_but

# -- questions ---------------------------------------------------------------------------------


class Found:
    """What a class holds is not put back after a trace."""

    answers: ClassVar[list[Any]] = []


def answers(ask: Callable[[Tensor], Any], mask: Tensor) -> list[Any]:
    Found.answers = []

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        Found.answers.append(ask(batch[1]))
        return model(batch[0]).mean()

    # Without weights: a forward pass would tell everything.
    trace_model(nn.Linear(4, 2).to("meta"), (torch.randn(3, 4), mask), loss=loss)
    return Found.answers


ASKS: dict[str, Callable[[Tensor], Any]] = {
    "all": lambda mask: bool(mask.all()),
    "any": lambda mask: bool((mask == 0).any()),
    "sum": lambda mask: mask[:, 1:].sum().item(),
    "equal": lambda mask: torch.equal(mask, torch.ones_like(mask)),
    "float": lambda mask: bool((torch.ones(3, 4) == mask.float()).all()),
    "cat": lambda mask: torch.cat([mask[:, :1] - 1, mask], 1).cumsum(-1).max().item(),
    "arange": lambda mask: (torch.arange(4)[None] * mask).sum().item(),
    "picked": lambda mask: torch.randn(3, 4, 2)[mask != 0].shape,
    "picked beside": lambda mask: torch.randn(3, 4)[:, mask[0] != 0].shape,
    "nonzero": lambda mask: mask.nonzero().shape,
    "unique": lambda mask: [t.shape for t in mask.unique(return_inverse=True)],
    "repeated": lambda mask: mask.repeat_interleave(mask[:, 0], dim=0).shape,
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
@pytest.mark.parametrize("mask", [torch.ones(3, 4).long(), torch.tril(torch.ones(3, 4)).bool()])
def test_the_answer_is_that_of_the_batch(ask: Callable[[Tensor], Any], mask: Tensor) -> None:
    mask = mask.int()
    assert answers(ask, mask) == [ask(mask)]


@pytest.mark.parametrize(
    "ask",
    [
        lambda mask: bool(mask.fill_(1).all()),
        lambda mask: mask[:1].add_(1) is mask or bool(mask.all()),
        lambda mask: bool(torch.randint_like(mask, 2).all()),
    ],
    ids=["filled", "written through a view", "drawn"],
)
def test_what_is_written_or_drawn_is_unknown(ask: Callable[[Tensor], Any]) -> None:
    with pytest.raises(TraceError, match="reads the value of a tensor"):
        answers(ask, torch.ones(3, 4).long())


def test_a_twin_of_a_twin_is_known() -> None:
    mask = torch.ones(3, 4).long()
    assert answers(ASKS["all"], fake_batch(mask, FakeTensorMode())) == [True]


def test_a_batch_without_values_is_traced() -> None:
    with FakeTensorMode():
        mask = torch.ones(3, 4).long()
    assert answers(lambda mask: mask.shape[0], mask) == [3]
    assert answers(lambda mask: mask.shape[0], torch.ones(3, 4, device="meta").long()) == [3]
    with pytest.raises(TraceError, match="reads the value of a tensor"):
        answers(ASKS["all"], mask)


# -- Hugging Face ------------------------------------------------------------------------------

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 20}
BART = {
    **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
    **{"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 20},
    **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {**SIZES, "intermediate_size": 64}),
    "OPT": ("OPTForCausalLM", {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "BART": ("BartForConditionalGeneration", BART),
    "BERT": ("BertForMaskedLM", {**SIZES, "intermediate_size": 64}),
}


def build(name: str, use_cache: bool = False) -> Any:
    transformers = pytest.importorskip("transformers")
    kind, sizes = MODELS[name]
    model_class = getattr(transformers, kind)
    torch.manual_seed(0)
    return model_class(model_class.config_class(**sizes, use_cache=use_cache)).train()


def batch_of(mask: str) -> dict[str, Tensor]:
    tokens = torch.randint(3, 20, (4, 64))
    batch = {"input_ids": tokens, "labels": tokens}
    if mask != "none":
        batch["attention_mask"] = torch.ones_like(tokens)
    if mask == "padded":
        batch["attention_mask"][3, 40:] = 0
    return batch


def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(**batch).loss
    return found


@pytest.mark.parametrize("mask", ["none", "ones", "padded"])
@pytest.mark.parametrize("name", slow_but(2, MODELS))
def test_masks_are_those_of_training(name: str, mask: str) -> None:
    model, batch = build(name), batch_of(mask)
    optimizer = torch.optim.AdamW(model.parameters())
    given: dict[str, Any] = {"loss": loss, "optimizer": optimizer}
    predicted = profile(model, batch, accounting="device", **given)
    assert predicted.peak_bytes == measure(model, batch, **given).peak_bytes


def test_several_sequences_in_a_row_are_seen() -> None:
    model, batch = build("Llama"), batch_of("none")
    batch["position_ids"] = torch.arange(32).repeat(4, 2)
    given: dict[str, Any] = {"loss": loss, "optimizer": torch.optim.AdamW(model.parameters())}
    predicted = profile(model, batch, accounting="device", **given)
    assert predicted.peak_bytes == measure(model, batch, **given).peak_bytes


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_lossless_plan_is_verified(use_cache: bool) -> None:
    model = build("Llama", use_cache)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = [Checkpointing("residual-1")]
    found = verify(plan, model, [batch_of("ones")], loss=loss, optimizer=optimizer, steps=1)
    assert found.ok
    assert found.predicted_peak_bytes == pytest.approx(found.measured_peak_bytes, rel=0.002)


@pytest.mark.parametrize("mask", ["ones", "padded"])
def test_a_microbatch_stands_for_those_with_padding(mask: str) -> None:
    """Only the last of the four is padded."""
    model, batch, plan = build("Llama"), batch_of(mask), [Microbatching(1)]
    optimizer = torch.optim.AdamW(model.parameters())
    trace = trace_plan(Plan.of(plan), model, batch, loss=loss, optimizer=optimizer)
    step = apply(plan, model, optimizer, loss=loss)
    step(batch)
    peak_bytes = int(device_timeline(trace).totals.max())
    assert peak_bytes == pytest.approx(step.measure(batch).peak_bytes, rel=0.002)


@pytest.mark.parametrize(("kind", "masked"), [("SGD", True), ("AdamW", False)])
def test_a_step_that_becomes_a_graph_asks_nothing(kind: str, masked: bool) -> None:
    """On CUDA that is the case with SGD; while it is captured the model cannot read a mask."""
    model, batch = build("Llama"), batch_of("ones")
    optimizer = getattr(torch.optim, kind)(model.parameters())
    given: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "device": "cuda"}
    trace = trace_plan(Plan(), model, batch, **given)
    shapes = {spec.shape for op in trace.ops for spec in op.outputs}
    assert ((4, 1, 64, 64) in shapes) is masked


@pytest.mark.slow
def test_forward_passes_tell_whether_a_graph_needs_more() -> None:
    """Where a model is known to ask, its step is traced once: as an eager one, or as a graph."""
    model, batch, ran = build("Llama"), batch_of("ones"), Backward()

    def counted(model: Any, batch: dict[str, Tensor]) -> Tensor:
        value = loss(model, batch)
        value.register_hook(ran)
        return value

    def shapes(**given: Any) -> set[tuple[int, ...]]:
        trace = trace_plan(Plan(), model, batch, loss=counted, device="cuda", **given)
        return {spec.shape for op in trace.ops for spec in op.outputs}

    asked = shapes(optimizer=torch.optim.AdamW(model.parameters()))  # reads its step count
    Backward.count = 0
    masked = shapes(optimizer=torch.optim.SGD(model.parameters()))
    assert (4, 1, 64, 64) in masked - asked
    assert Backward.count == 1


class Backward:
    """What a class holds is not put back after a trace."""

    count: ClassVar[int] = 0

    def __call__(self, gradient: Tensor) -> None:
        Backward.count += 1


def test_hugging_face_is_left_as_it_was() -> None:
    checks = pytest.importorskip("transformers.utils.import_utils")
    plain = checks.is_fake_tensor
    with pytest.raises(TraceError):
        answers(lambda mask: bool(mask.fill_(1).all()), torch.ones(3, 4).long())
    assert checks.is_fake_tensor is plain
