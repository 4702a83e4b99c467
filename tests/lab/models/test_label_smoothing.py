"""The label-smoothed loss of scores that are never all there, against the plain one."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoestring as ss
from shoestring.lab.models.dynamic_conv import DCTransformer, dc_transformer
from shoestring.lab.models.label_smoothing import PADDING, label_smoothed_loss, projected_loss

TOKENS, WIDTH, VOCABULARY = 4000, 32, 6632


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs (2, 5, 4), a weight of 11 words, and targets of which two are padding."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 5, 4), torch.randn(11, 4)
    target = torch.tensor([[0, 3, 10, 2, 4], [5, 7, 10, PADDING, PADDING]])
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("words", [1, 3, 4, 11, 100])
def test_is_the_plain_loss(words: int, smoothing: float) -> None:
    hidden, weight, target = operands()
    loss = projected_loss(hidden, weight, target, smoothing, words=words)
    plain = label_smoothed_loss(hidden @ weight.t(), target, smoothing)
    close = torch.testing.assert_close
    close(loss, plain, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(3 * loss, (hidden, weight))
    expected = torch.autograd.grad(3 * plain, (hidden, weight))
    close(grads, expected, rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    hidden, weight, target = operands()
    assert torch.autograd.gradcheck(
        lambda h, w: projected_loss(h, w, target, words=4), (hidden, weight)
    )


def test_one_gradient_alone() -> None:
    hidden, weight, target = operands()
    both = torch.autograd.grad(projected_loss(hidden, weight, target, words=4), (hidden, weight))
    frozen = projected_loss(hidden, weight.detach(), target, words=4)
    assert torch.equal(torch.autograd.grad(frozen, hidden)[0], both[0])
    fixed = projected_loss(hidden.detach(), weight, target, words=4)
    assert torch.equal(torch.autograd.grad(fixed, weight)[0], both[1])


def test_padding_alone_has_no_loss() -> None:
    hidden, weight, target = operands()
    loss = projected_loss(hidden, weight, torch.full_like(target, PADDING), words=4)
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert loss.item() == 0 and all(grad.eq(0).all() for grad in grads)


def test_tied_with_an_embedding() -> None:
    _, weight, target = operands()
    losses = (
        projected_loss(F.embedding(target, weight), weight, target, words=4),
        label_smoothed_loss(F.embedding(target, weight) @ weight.t(), target),
    )
    grads = [torch.autograd.grad(loss, weight)[0] for loss in losses]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_half_precision_gradients_see_the_loss_scale_before_they_are_rounded() -> None:
    """4,000 tokens: unscaled, the gradient of an unlikely word is below FP16's smallest number."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH).half().requires_grad_()
    weight = torch.randn(600, WIDTH).mul(0.2).half().requires_grad_()
    target = torch.randint(2, 600, (TOKENS,))
    scale = 2.0**13

    def errors(loss: Tensor, inputs: tuple[Tensor, ...]) -> list[float]:
        found = torch.autograd.grad(loss * scale, inputs)
        assert all(grad.isfinite().all() for grad in found)
        return [
            ((mine.double() / scale - exact).norm() / exact.norm()).item()
            for mine, exact in zip(found, expected, strict=True)
        ]

    exact = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = torch.autograd.grad(label_smoothed_loss(exact[0] @ exact[1].t(), target), exact)
    lean = errors(projected_loss(hidden, weight, target, words=100), (hidden, weight))
    plain = errors(label_smoothed_loss(hidden @ weight.t(), target), (hidden, weight))
    assert all(mine < 1e-3 for mine in lean)
    assert all(mine < 1.5 * theirs for mine, theirs in zip(lean, plain, strict=True))


class Projection(nn.Module):
    """An input of that many tokens, and the loss of its scores."""

    def __init__(self, lean: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.lean = lean

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The mean loss."""
        hidden = self.first(batch[0])
        if self.lean:
            return projected_loss(hidden, self.weight, batch[1])
        return label_smoothed_loss(F.linear(hidden, self.weight), batch[1])


@pytest.mark.slow
def test_memory_at_4000_tokens() -> None:
    batch = torch.randn(TOKENS, WIDTH), torch.randint(2, VOCABULARY, (TOKENS,))
    peaks = {}
    for lean in (False, True):
        model = Projection(lean)
        measured = ss.measure(model, batch, loss=lambda m, b: m(b), warmup_steps=1)
        profile = ss.profile(model, batch, loss=lambda m, b: m(b), accounting="device")
        assert measured.peak_bytes == profile.peak_bytes
        peaks[lean] = measured.peak_bytes
    scores_bytes = 4 * TOKENS * VOCABULARY
    assert peaks[False] > 4 * scores_bytes
    assert peaks[True] < scores_bytes / 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu() -> None:
    """FP16: the exact gradients, in less than the scores alone would take."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, 512).half().cuda().requires_grad_()
    weight = torch.randn(VOCABULARY, 512).mul(0.04).half().cuda().requires_grad_()
    target = torch.randint(2, VOCABULARY, (TOKENS,), device="cuda")
    scale = 2.0**13
    (scale * projected_loss(hidden, weight, target)).backward()  # cuBLAS takes its workspace
    hidden.grad = weight.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    (scale * projected_loss(hidden, weight, target)).backward()
    needed = torch.cuda.max_memory_allocated() - before
    assert needed < 2 * TOKENS * VOCABULARY
    exact = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    expected = torch.autograd.grad(label_smoothed_loss(exact[0] @ exact[1].t(), target), exact)
    for mine, wanted in zip((hidden.grad, weight.grad), expected, strict=True):
        assert mine is not None
        assert (mine.double() / scale - wanted).norm() < 2e-3 * wanted.norm()


def model_and_batch() -> tuple[DCTransformer, tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(0)
    rates = {"dropout": 0.0, "attention_dropout": 0.0, "weight_dropout": 0.0}
    sizes = {"source_vocabulary": 20, "target_vocabulary": 24}
    model = dc_transformer(width=16, encoder_layers=2, decoder_layers=2, **sizes, **rates)
    source, target = torch.randint(4, 20, (2, 6)), torch.randint(4, 24, (2, 6))
    target[1, 4:] = PADDING
    return model, (source, target[:, :-1], target[:, 1:])


def plain_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The loss of all scores."""
    return label_smoothed_loss(model(*batch[:2]), batch[2])


def lean_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The loss the model makes itself."""
    return model(*batch)


@pytest.mark.parametrize("density", [1.0, 0.5])
def test_the_models_own_loss_is_the_plain_one(density: float) -> None:
    model, batch = model_and_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if density < 1:
        ss.apply([ss.Sparsity(density)], model, optimizer, loss=lean_loss)
    parameters = list(model.parameters())
    losses = [make(model, batch) for make in (lean_loss, plain_loss)]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss, parameters) for loss in losses))


def test_the_models_own_loss_under_all_techniques() -> None:
    model, batch = model_and_batch()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    techniques = [
        ss.Sparsity(0.5), ss.Precision("fp16"), ss.Microbatching(1), ss.Checkpointing("residual-1"),
    ]  # fmt: skip
    step = ss.apply(techniques, model, optimizer, loss=lean_loss)
    losses = [float(step(batch)) for _ in range(12)]
    assert losses[-1] < 0.9 * losses[0]
