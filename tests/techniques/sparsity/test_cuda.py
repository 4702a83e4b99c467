"""On a GPU: the same training as on the CPU, with no dense weight or table of positions left."""

import copy
import gc

import pytest
import torch
from torch import nn

from shoestring.step.apply import apply
from shoestring.techniques import Sparsity
from shoestring.techniques.sparsity import sparse_tensors, to_dense

from .small_models import CASES, OPTIMIZERS, build
from .test_kernels import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_kernels() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    compare("cuda")


@pytest.mark.parametrize("density", [0.4, 0.05])
@pytest.mark.parametrize("case", CASES)
def test_the_same_as_on_the_cpu(case: str, density: float) -> None:
    """Double precision; the model is moved after it was made sparse."""
    _, batch_of, loss = CASES[case]
    states = []
    for device in ("cpu", "cuda"):
        model = build(case).double()
        settings = Sparsity(density, schedule=((1000, 2),), threshold=0.05)
        step = apply([settings], model, OPTIMIZERS["sgd"](model), loss=loss)
        model.to(device)
        assert all(t.index.device.type == device for t in sparse_tensors(model).values())
        for number in range(6):
            batch = batch_of(number)
            on_device = (
                batch.to(device)
                if isinstance(batch, torch.Tensor)
                else (batch[0].double().to(device), batch[1].to(device))
            )
            step(on_device)
        assert len({id(b) for b in model.buffers()}) == len(list(model.buffers()))
        states.append({name: t.cpu() for name, t in to_dense(model).items()})
    for name, expected in states[0].items():
        torch.testing.assert_close(states[1][name], expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_dense_weight_at_a_time(dtype: torch.dtype) -> None:
    """Eight large layers on few examples: the peak is the values, and one dense weight."""
    pytest.importorskip("triton", reason="triton is not installed")
    layers = [nn.Linear(2048, 2048, bias=False) for _ in range(8)]
    model = nn.Sequential(*layers).to("cuda", dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dense = 2048 * 2048 * dtype.itemsize

    def loss(m: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return m(batch).float().square().mean()

    step = apply([Sparsity(0.1, method="static")], model, optimizer, loss=loss)
    step.use_graph(False)  # a graph's pool is allocated all the time
    batch = torch.randn(4, 2048, device="cuda", dtype=dtype)
    step(batch)
    step(batch)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(batch)
    torch.cuda.synchronize()
    gradients = 8 * sparse_tensors(model)["0.weight"].nonzeros * dtype.itemsize
    peak = torch.cuda.max_memory_allocated() - before - gradients
    assert dense <= peak < 1.05 * dense + 200_000


def test_a_captured_step_replays() -> None:
    """Scatter and gather wait for nothing, so a static pattern can be in a CUDA graph."""
    pytest.importorskip("triton", reason="triton is not installed")
    _, batch_of, loss = CASES["convolutions"]
    model = build("convolutions").cuda()
    plain = copy.deepcopy(model)
    for one in (model, plain):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.0)
        apply([Sparsity(0.4, method="static")], one, optimizer, loss=loss)
    images, labels = batch_of(0)
    batch = images.cuda(), labels.cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            loss(model, batch).backward()
            model.zero_grad()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss(model, batch).backward()
    graph.replay()
    loss(plain, batch).backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-4)
