"""On CUDA: a step in one graph is the eager step to the bit, its random numbers included."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoestring.step import graph as graphs
from shoestring.step.apply import apply
from shoestring.step.step import Step
from shoestring.techniques import Checkpointing, Microbatching, Precision
from shoestring.trace.batches import form_of
from techniques.small_models import Attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 7


class Language(nn.Module):
    """As GPT-2 is made: dropout behind the embedding, in attention and behind every part."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(50, 32), nn.Dropout(0.2)
        self.layers = nn.ModuleList(Attention(32, 0.2) for _ in range(4))
        self.norm = nn.LayerNorm(32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embedding(tokens))
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embedding.weight)


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "capturable": lambda p: torch.optim.AdamW(p, lr=1e-3, capturable=True),
}


def started(optimizer: str, *techniques: Any, model: nn.Module | None = None) -> Step:
    torch.manual_seed(0)
    model = (Language() if model is None else model).cuda()
    return apply(list(techniques), model, OPTIMIZERS[optimizer](model.parameters()), loss=loss)


def batches(lengths: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 50, (8, n), generator=generator).cuda() for n in lengths]


def trained(step: Step, data: list[torch.Tensor], seed: int = 5) -> list[torch.Tensor]:
    """Losses, and after all of them parameters, optimizer state and the next random numbers."""
    torch.manual_seed(seed)
    found = []
    for number, batch in enumerate(data):
        if number == 5:
            torch.cuda.manual_seed(11)  # a captured step follows a new seed too
        found.append(step(batch))
        found.append(torch.tensor(torch.cuda.default_generators[0].get_offset()))
    found += [p.detach().clone() for p in step.model.parameters()]
    for parameter in step.model.parameters():
        found += [v.clone() for v in step.optimizer.state[parameter].values() if v is not None]
    for item in step._setup.state.values():
        found += [v for v in item.state_dict().values() if isinstance(v, torch.Tensor)]
    return [*found, torch.rand(5, device="cuda")]


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor], what: str) -> None:
    assert len(one) == len(other)
    wrong = [n for n, (a, b) in enumerate(zip(one, other, strict=True)) if not torch.equal(a, b)]
    assert not wrong, f"{what}: {len(wrong)} of {len(one)} differ, first {wrong[:6]}"


PLANS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "plain": ("sgd", ()),
    "capturable": ("capturable", ()),
    "residual-1": ("sgd", (Checkpointing("residual-1"),)),
    "residual-2": ("sgd", (Checkpointing("residual-2"),)),
    "residual-2*": ("sgd", (Checkpointing("residual-2*"),)),
    "no-bn": ("sgd", (Checkpointing("no-bn"),)),
    "microbatches": ("sgd", (Checkpointing("residual-2*"), Microbatching(3))),
    "fp16": ("sgd", (Precision("fp16"), Checkpointing("residual-1"), Microbatching(2))),
    "fp16 adam": ("adam", (Precision("fp16"), Checkpointing("residual-2*"), Microbatching(4))),
    "bf16": ("sgd", (Precision("bf16"), Checkpointing("residual-1"))),
    "bf16 adam": ("adam", (Precision("bf16"), Microbatching(4))),
}


@pytest.mark.parametrize("name", PLANS)
def test_losses_weights_state_and_random_stream_are_the_eager_ones(name: str) -> None:
    optimizer, techniques = PLANS[name]
    data = batches([9] * STEPS)
    results = []
    for graph in (False, False, True):
        step = started(optimizer, *techniques)
        step.use_graph(graph)
        results.append(trained(step, data))
        assert step.captured == graph
    assert_same(results[0], results[1], "eager twice: the kernels are not deterministic")
    assert_same(results[0], results[2], "eager and captured")
    offsets = [int(value) for value in results[2][1 : 2 * STEPS : 2]]
    assert offsets[0] > 0 and offsets[1] == 2 * offsets[0] and offsets[4] == 5 * offsets[0]


def test_stochastic_rounding_draws_anew_at_every_replay() -> None:
    step = started("sgd", Precision("bf16"))
    (batch,) = batches([9])
    noise = step._setup.state["precision"].noise
    counters = []
    for _ in range(5):
        step(batch)
        counters.append(int(noise.counter))
    assert step.captured and len(set(counters)) == 5


def test_every_shape_has_its_graph_and_they_share_their_memory() -> None:
    lengths = [5, 9, 5, 13, 9, 13, 5, 9, 13, 5]
    plan = (Precision("fp16"), Checkpointing("residual-1"), Microbatching(4))
    eager, captured = started("adam", *plan), started("adam", *plan)
    eager.use_graph(False)
    data = batches(lengths)
    assert_same(trained(eager, data), trained(captured, data), "eager and captured")
    assert captured._graph is not None and len(captured._graph._graphs) == 3
    peaks = [graph.peak_bytes for graph in captured._graph._graphs.values()]
    assert captured._graph.peak_bytes == max(peaks)


def test_the_shape_used_longest_ago_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    step = started("sgd")
    data = batches([4, 4, 4, 5, 5, 5, 4, 6, 6, 6])
    for batch in data:
        step(batch)
    assert step._graph is not None
    assert list(step._graph._graphs) == [form_of(data[0]), form_of(data[-1])]


def test_other_numbers_or_tensors_are_not_replayed() -> None:
    plan = (Precision("fp16"), Checkpointing("residual-1"))
    eager, captured = started("adam", *plan), started("adam", *plan)
    eager.use_graph(False)
    data = batches([9] * 4)
    results = []
    for step in (eager, captured):
        trained(step, data)
        assert step.captured == (step is captured)
        saved = step.state_dict()
        for group in step.optimizer.param_groups:
            group["lr"], group["weight_decay"] = 5e-3, 1e-2
        trained(step, data)
        step.load_state_dict(saved)  # the optimizer makes tensors of its own for what it loads
        step.model.layers[0].norm1.weight.requires_grad_(False)
        step.model.layers[1].eval()
        results.append(trained(step, data))
    assert_same(*results, "eager and captured")


class Waits(Language):
    """Reads a value of the device when it is asked to."""

    waits = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out = super().forward(tokens)
        if self.waits and out.isnan().any():
            raise AssertionError
        return out


class Counts(Language):
    """Keeps a number in Python that the result depends on."""

    calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(tokens) * (1 + 0.01 * self.calls)


class DrawsOnHost(Language):
    """Leaves out a layer by a number drawn on the host."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * (0.5 if torch.rand(()) < 0.5 else 1.0)


class FindsNoMemory(Language):
    """The allocator's pool of a graph has segments of its own."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(tokens)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Waits, "captur"),
        (Counts, "Counts changes its calls"),
        (DrawsOnHost, "on the host"),
        (FindsNoMemory, "out of memory"),
    ],
)
def test_a_step_that_cannot_be_captured_stays_eager_and_right(kind: Any, said: str) -> None:
    data = batches([9] * 5)
    results = []
    for graph in (False, True):
        torch.manual_seed(0)
        model = kind()
        if kind is Waits:
            model.waits = True
        step = started("sgd", Checkpointing("residual-2*"), Microbatching(4), model=model)
        step.use_graph(graph)
        if graph:
            with pytest.warns(RuntimeWarning, match=f"not captured as a CUDA graph.*{said}"):
                results.append(trained(step, data))
        else:
            results.append(trained(step, data))
        assert not step.captured
    assert_same(*results, "eager and after a capture that failed")
    torch.cuda.synchronize()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    working = started("sgd", Checkpointing("residual-1"))  # what failed is in nobody's way
    trained(working, data)
    assert working.captured


def test_hooks_of_the_optimizer_are_called_at_every_update() -> None:
    step, calls = started("sgd", Precision("fp16")), []
    data = batches([9] * 4)
    for batch in data:
        step(batch)
    assert step.captured
    handle = step.optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    for batch in data:
        step(batch)
    assert len(calls) == 4
    handle.remove()
    step(data[0])
    assert len(calls) == 4 and step.captured


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_captured_step_follows_a_learning_rate_that_moves_at_every_step(optimizer: str) -> None:
    data = batches([9] * 6)
    results = []
    for graph in (False, True):
        step = started(optimizer, Precision("fp16"), Checkpointing("residual-1"))
        step.use_graph(graph)
        schedule = torch.optim.lr_scheduler.LambdaLR(step.optimizer, lambda n: 1 / (1 + n))
        torch.manual_seed(5)
        losses = []
        for batch in data:
            losses.append(step(batch))
            schedule.step()
        assert step.captured == graph
        results.append([*losses, *(p.detach().clone() for p in step.model.parameters())])
    assert_same(*results, "eager and captured")
    assert not torch.equal(results[1][0], results[1][5])


def test_settings_that_move_at_every_step_are_not_captured_for_nothing() -> None:
    step = started("sgd")
    (batch,) = batches([9])
    for number in range(12):
        if number % 2 == 0:
            step.optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        step(batch)
    assert step._graph is not None and not step._graph.enabled


WEIGHT = {"of": 1.0}


def weighed(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return loss(model, tokens) * WEIGHT["of"]


def test_a_captured_step_follows_a_number_that_the_loss_reads() -> None:
    data = batches([9] * 9)
    results = []
    for graph in (False, True):
        torch.manual_seed(0)
        model = Language().cuda()
        step = apply([], model, OPTIMIZERS["sgd"](model.parameters()), loss=weighed)
        step.use_graph(graph)
        torch.manual_seed(5)
        losses = []
        for number, batch in enumerate(data):
            WEIGHT["of"] = 1.0 + number // 4
            losses.append(step(batch))
        assert step.captured == graph
        results.append(losses)
    ratio = results[1][8] / results[1][0]
    assert ratio > 1.5
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


def test_a_pinned_batch_is_filled_again_at_once() -> None:
    data = [batch.cpu() for batch in batches([9] * 40)]
    results = []
    for graph in (False, True):
        step = started("sgd")
        step.use_graph(graph)
        pinned = data[0].pin_memory()
        torch.manual_seed(5)
        losses = []
        for batch in data:
            pinned.copy_(batch)
            losses.append(step(pinned))
            pinned.zero_()
        assert step.captured == graph
        results.append(losses)
    assert_same(*results, "eager and captured")


def test_another_thread_pins_memory_while_a_step_is_captured() -> None:
    failed: list[BaseException] = []
    over = threading.Event()

    def pin() -> None:
        held = []
        try:
            while not over.is_set():
                held.append(torch.empty(2**16 + len(held)).pin_memory())
                if len(held) > 200:
                    held.clear()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        step = started("sgd", Checkpointing("residual-1"), Microbatching(2))
        for batch in batches([5, 5, 9, 9, 13, 13, 17, 17]):
            step(batch)
    finally:
        over.set()
        thread.join()
    assert not failed and step.captured


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_second_gpu_trains_too() -> None:
    for device in ("cuda:0", "cuda:1"):
        torch.manual_seed(0)
        model = Language().to(device)
        step = apply([], model, OPTIMIZERS["sgd"](model.parameters()), loss=loss)
        losses = [float(step(batches([9])[0].to(device))) for _ in range(8)]
        assert step.captured and losses[-1] < losses[0]
