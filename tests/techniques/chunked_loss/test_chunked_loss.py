"""Head and loss in chunks beside the same computed whole."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss
from shoestring.errors import InputError, NoEffectWarning
from shoestring.lab.models.label_smoothing import label_smoothed_loss
from shoestring.step.predict import predict_step
from shoestring.techniques import chunked_loss as technique

WORDS, ROWS, LENGTH = 700, 12, 9
Loss = Callable[[nn.Module, Any], torch.Tensor]


class Words(nn.Module):
    """An embedding and a head, tied or with a bias."""

    def __init__(self, tied: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.norm = nn.LayerNorm(16)
        self.head = None if tied else nn.Linear(16, WORDS, bias=bias)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(words))
        if self.head is None:
            return F.linear(hidden, self.embedding.weight)
        return self.head(hidden)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    words, labels = (torch.randint(WORDS, (ROWS, LENGTH), generator=draw) for _ in range(2))
    labels[0, :4] = -100
    return words, labels


WEIGHTS = torch.rand(WORDS, generator=torch.Generator().manual_seed(2))


def shifted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    kept = logits[..., :-1, :].contiguous()
    return F.cross_entropy(kept.view(-1, WORDS), labels[..., 1:].reshape(-1))


def summed(log_p: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Label smoothing as it is often written by hand."""
    true = -log_p.gather(dim=-1, index=labels.clamp_min(0)[:, None])
    smooth = -log_p.sum(dim=-1, keepdim=True)
    kept = labels != -100
    return 0.9 * true[kept].mean() + 0.1 / WORDS * smooth[kept].mean()


FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "flat": lambda x, t: F.cross_entropy(x.float().view(-1, x.size(-1)), t.view(-1)),
    "shifted": shifted,
    "classes second": lambda x, t: F.cross_entropy(x.transpose(1, 2), t),
    "permuted": lambda x, t: nn.CrossEntropyLoss()(x.permute(0, 2, 1), t),
    "nll": lambda x, t: F.nll_loss(F.log_softmax(x, dim=-1).flatten(0, 1), t.flatten()),
    "sum": lambda x, t: F.cross_entropy(x.flatten(0, -2), t.flatten(), reduction="sum") / 7,
    "each": lambda x, t: (
        F.cross_entropy(x.transpose(1, 2), t, reduction="none") * torch.arange(LENGTH)
    ).mean(),
    "smoothed": lambda x, t: F.cross_entropy(x.flatten(0, 1), t.flatten(), label_smoothing=0.1),
    "weighted": lambda x, t: F.cross_entropy(x.flatten(0, 1), t.flatten(), WEIGHTS),
    "both": lambda x, t: F.cross_entropy(
        x.flatten(0, 1), t.flatten(), weight=WEIGHTS, label_smoothing=0.2, reduction="sum"
    ),
    "other padding": lambda x, t: F.cross_entropy(
        x.flatten(0, 1), t.flatten().clamp_min(0), ignore_index=0
    ),
    "scaled": lambda x, t: F.cross_entropy((x * 0.5 / 3).flatten(0, 1), t.flatten()),
    "capped": lambda x, t: F.cross_entropy((torch.tanh(x / 3) * 3).flatten(0, 1), t.flatten()),
    "masked": lambda x, t: F.cross_entropy(x[t != -100], t[t != -100]),
    "last": lambda x, t: F.cross_entropy(x[:, -1], t[:, -1]),
    "gathered": lambda x, t: -(
        x.float().log_softmax(-1).gather(-1, t.clamp_min(0)[..., None]).squeeze(-1)
    )[t != -100].mean(),
    "gathered and summed": lambda x, t: summed(F.log_softmax(x.flatten(0, 1), -1), t.flatten()),
    "gathered and averaged": lambda x, t: label_smoothed_loss(x, t.clamp_min(0)),
    "more bias": lambda x, t: F.cross_entropy((x + WEIGHTS[None]).flatten(0, 1), t.flatten()),
}  # fmt: skip


def gradients_of(model: nn.Module, run: Callable[[], torch.Tensor]) -> tuple[float, dict[str, Any]]:
    value = run()
    value.backward()
    made = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return float(value.detach()), made


def compared(
    model: nn.Module,
    loss: Loss,
    given: Any = None,
    tolerance: float = 2e-6,
    columns: int | None = 100,
) -> None:
    """Loss and gradients of one step, both ways, relative to the largest element."""
    given = batch() if given is None else given
    expected, plain = gradients_of(model, lambda: loss(model, given))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ss.apply([ss.ChunkedLoss(columns)], model, optimizer, loss=loss)
    found, made = gradients_of(model, lambda: step._setup.run(given))
    assert found == pytest.approx(expected, rel=tolerance)
    assert plain.keys() == made.keys()
    for name, gradient in plain.items():
        assert gradient.dtype == made[name].dtype
        far = (gradient - made[name]).abs().max()
        assert float(far) <= tolerance * (1e-3 + 2 * float(gradient.abs().max())), name


@pytest.mark.parametrize("tied", [False, True], ids=["bias", "tied"])
@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_are_the_same(form: str, tied: bool) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoEffectWarning)  # the logits were never whole
        compared(Words(tied), lambda m, b: FORMS[form](m(b[0]), b[1]))


def test_gradients_are_as_exact_as_those_of_whole_logits() -> None:
    """A bias before the head adds up what hardly differs from row to row."""
    draw = torch.Generator().manual_seed(3)
    rows, head = (torch.randn(n, 32, generator=draw) for n in (4000, 97))
    words = torch.randint(97, (4000,), generator=draw)

    def gradient(dtype: torch.dtype, *plan: ss.Technique) -> torch.Tensor:
        model = nn.Linear(32, 97, bias=False).to(dtype)
        model.weight = nn.Parameter((0.2 * head + 0.3).to(dtype), requires_grad=False)
        model.moved = nn.Parameter(torch.zeros(32, dtype=dtype))

        def loss(model: Any, given: Any) -> torch.Tensor:
            return F.cross_entropy(model(rows.to(dtype) + model.moved), words)

        own = torch.optim.SGD([model.moved], lr=0.1)
        ss.apply(plan, model, own, loss=loss)(words, update=False)
        return model.moved.grad.double()

    exact, whole, parts = (
        gradient(torch.float64),
        gradient(torch.float32),
        gradient(torch.float32, ss.ChunkedLoss(16)),
    )
    assert (parts - exact).norm() < 1.5 * (whole - exact).norm()


@pytest.mark.parametrize("form", ["shifted", "weighted", "scaled"])
def test_a_16_bit_model_rounds_as_it_does_whole(form: str) -> None:
    torch.manual_seed(0)
    compared(Words().bfloat16(), lambda m, b: FORMS[form](m(b[0]).float(), b[1]), tolerance=0.02)


@pytest.mark.parametrize("frozen", ["head.weight", "embedding.weight"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    torch.manual_seed(0)
    model = Words()
    model.get_parameter(frozen).requires_grad_(False)
    compared(model, lambda m, b: FORMS["flat"](m(b[0]), b[1]))


def test_autocast() -> None:
    def loss(model: nn.Module, given: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            value = FORMS["flat"](model(given[0]), given[1])
        assert value.dtype is torch.float32
        return value

    torch.manual_seed(0)
    compared(Words(), loss, tolerance=0.02)


class Twice(torch.autograd.Function):
    """Reads its input where PyTorch's functions do not see it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def divided_in_place(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    x.div_(2)
    x[..., 0] = -1.0
    return F.cross_entropy(x.flatten(0, 1), t.flatten())


def read_before(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    hits = (x.argmax(-1) == t).float().mean()
    return F.cross_entropy(x.flatten(0, 1), t.flatten()) * (1 + hits)


ELSEWHERE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "custom function": lambda x, t: F.cross_entropy(Twice.apply(x).flatten(0, 1), t.flatten()),
    "custom function, then the loss": lambda x, t: Twice.apply(x).mean() + FORMS["flat"](x, t),
    "in place": divided_in_place,
    "read before": read_before,
    "softmax": lambda x, t: -x.softmax(-1).log().flatten(0, 1)[range(108), t.flatten()].mean(),
    "probabilities": lambda x, t: F.cross_entropy(x.flatten(0, 1), torch.ones(108, WORDS) / WORDS),
    "capped twice": lambda x, t: F.cross_entropy(x.tanh().tanh().flatten(0, 1), t.flatten()),
    "z-loss": lambda x, t: x.logsumexp(-1).square().mean() + FORMS["flat"](x, t),
    "some classes": lambda x, t: F.cross_entropy(x[..., :10].flatten(0, 1), t.flatten() % 10),
    "positions second": lambda x, t: F.cross_entropy(x, t.new_zeros(ROWS, WORDS)),
    "added": lambda x, t: FORMS["flat"](x + x.new_ones(ROWS, LENGTH, 1), t),
    "by a tensor": lambda x, t: FORMS["flat"](x * torch.full((), 2.0), t),
}  # fmt: skip


@pytest.mark.parametrize("form", ELSEWHERE)
@pytest.mark.filterwarnings("ignore::shoestring.errors.NoEffectWarning")
def test_logits_that_something_reads_are_computed(form: str) -> None:
    torch.manual_seed(0)
    compared(Words(), lambda m, b: ELSEWHERE[form](m(b[0]), b[1]))


@pytest.mark.filterwarnings("ignore::shoestring.errors.NoEffectWarning")
def test_a_backward_hook_sees_the_logits() -> None:
    torch.manual_seed(0)
    model, seen = Words(), []
    model.head.register_full_backward_hook(lambda m, i, o: seen.append(o[0].shape))
    compared(model, lambda m, b: FORMS["flat"](m(b[0]), b[1]))
    assert len(seen) == 2


def test_no_cross_entropy_says_so() -> None:
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ss.apply([ss.ChunkedLoss()], model, optimizer, loss=lambda m, b: m(b[0]).square().mean())
    with pytest.warns(NoEffectWarning, match="computed whole"):
        step(batch())


def test_what_was_changed_in_place_is_refused() -> None:
    def hidden_changes(model: Any, given: Any) -> torch.Tensor:
        hidden = model.norm(model.embedding(given[0]))
        logits = model.head(hidden)
        hidden.mul_(2)
        return FORMS["flat"](logits, given[1])

    def view_changes(model: Any, given: Any) -> torch.Tensor:
        logits = model(given[0])
        flat = logits.view(-1, WORDS)
        logits.mul_(2)
        return F.cross_entropy(flat, given[1].view(-1))

    for loss in (hidden_changes, view_changes):
        model = Words()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(InputError, match="changed in place"):
            ss.apply([ss.ChunkedLoss()], model, optimizer, loss=loss)(batch())
    assert F.linear.__name__ == "linear" and "heads" not in str(F.linear)


def test_a_target_that_is_no_class_is_refused() -> None:
    model, (words, labels) = Words(), batch()
    labels[2, 2] = WORDS
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss: Loss = lambda m, b: FORMS["flat"](m(b[0]), b[1])  # noqa: E731
    step = ss.apply([ss.ChunkedLoss()], model, optimizer, loss=loss)
    with pytest.raises(IndexError, match="Target 700 is out of bounds"):
        step((words, labels))


@pytest.mark.parametrize(
    "others",
    [
        (),
        (ss.Precision("bf16"),),
        (ss.Microbatching(4),),
        (ss.Checkpointing("no-bn"),),
        (ss.Checkpointing("every-2"),),
        (ss.Sparsity(0.5),),
    ],
    ids=str,
)
def test_the_predicted_peak_is_measured(others: tuple[ss.Technique, ...]) -> None:
    torch.manual_seed(0)
    model, given = Words(), batch()
    loss: Loss = lambda m, b: FORMS["shifted"](m(b[0]), b[1])  # noqa: E731
    own = torch.optim.AdamW(model.parameters(), lr=1e-3)
    about: dict[str, Any] = {"loss": loss, "optimizer": own}
    plan = [ss.ChunkedLoss(100), *others]
    plain = predict_step(others, model, given, **about).peak_bytes
    predicted = predict_step(plan, model, given, **about).peak_bytes
    assert predicted < 0.9 * plain
    step = ss.apply(plan, model, own, loss=loss)
    with warnings.catch_warnings():  # no-bn saves nothing: the loss alone reads the norm's output
        warnings.simplefilter("ignore", NoEffectWarning)
        step(given)
    assert step.measure(given).peak_bytes == pytest.approx(predicted, rel=0.01)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=5000, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=5000, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(5000, (4, 16), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids.roll(1, 1)}


def hugging_face(model: nn.Module, given: Any) -> torch.Tensor:
    return model(**given).loss


@pytest.mark.parametrize("build", [llama, bert])
def test_hugging_face_models(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = build()
    compared(model, hugging_face, tokens(), columns=None)


def test_it_is_planned_where_logits_are_the_peak_and_certified() -> None:
    torch.manual_seed(0)
    model, given = llama(), tokens()
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    about: dict[str, Any] = {"loss": hugging_face, "optimizer": own}
    plain = ss.profile(model, given, **about, accounting="device").peak_bytes
    plan = ss.plan(model, given, **about, budget=int(0.62 * plain), allow="lossless")
    assert plan.chunked_loss == ss.ChunkedLoss() and plan.kind == "lossless"
    certificate = ss.verify(plan, model, [given], **about)
    assert certificate.ok, certificate
    assert certificate.measured_peak_bytes <= plan.budget_bytes


def test_settings_are_written_and_read(tmp_path: Path) -> None:
    plan = ss.Plan([ss.ChunkedLoss(512)])
    plan.save(tmp_path / "plan.toml")
    assert ss.Plan.load(tmp_path / "plan.toml") == plan
    assert ss.Plan([ss.ChunkedLoss()]).short() == "chunked loss"
    with pytest.raises(InputError, match="whole number"):
        ss.ChunkedLoss(-1)


def test_the_readme_runs() -> None:
    page = (Path(technique.__file__).parent / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu_the_step_is_captured_and_the_peak_predicted() -> None:
    """BF16, recomputed blocks, a CUDA graph; the loss of both ways after some updates."""
    losses = {}
    for chunked in (False, True):
        torch.manual_seed(0)
        model = llama().cuda().bfloat16()
        given = {name: tensor.cuda() for name, tensor in tokens().items()}
        own = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
        plan = [ss.Checkpointing("residual-1"), *([ss.ChunkedLoss()] if chunked else [])]
        predicted = predict_step(
            plan, model, given, loss=hugging_face, optimizer=own, device="cuda"
        ).peak_bytes
        step = ss.apply(plan, model, own, loss=hugging_face)
        losses[chunked] = [float(step(given)) for _ in range(4)]
        assert step.captured
        assert step.measure(given).peak_bytes <= 1.05 * predicted
    assert losses[True] == pytest.approx(losses[False], rel=0.02)
