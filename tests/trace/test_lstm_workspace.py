"""The workspace of an LSTM layer, fitted to oneDNN, is what oneDNN returns."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoestring.trace.onednn import lstm_workspace_bytes

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN"
)


class Workspaces(TorchDispatchMode):
    """Collects the sizes of each fused layer and of the workspace it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[int, ...], int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mkldnn_rnn_layer.default:
            sizes = (*args[0].shape, args[2].shape[1], args[0].element_size())
            self.seen.append((sizes, out[3].nbytes))
        return out


def sizes() -> Iterator[tuple[int, int, int, int]]:
    """Length, batch, input and hidden width: around paddings, pages and multiples of 256."""
    yield from [(1, 1, 1, 1), (64, 16, 256, 256), (5, 3, 7, 11), (3, 16, 256, 256)]
    yield from [(2, 5, 512, 64), (4, 4, 650, 650), (7, 5, 33, 100), (9, 2, 16, 17), (6, 8, 240, 15)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_workspace(dtype: torch.dtype, bidirectional: bool, training: bool) -> None:
    with Workspaces() as workspaces:
        for length, batch, inputs, hidden in sizes():
            lstm = nn.LSTM(inputs, hidden, num_layers=2, bidirectional=bidirectional, dtype=dtype)
            lstm.train(training)(torch.randn(length, batch, inputs, dtype=dtype))
    if dtype is torch.bfloat16 and not workspaces.seen:
        pytest.skip("no fused layer for bfloat16 on this processor")
    assert len(workspaces.seen) == 2 * (1 + bidirectional) * len(list(sizes()))
    for given, nbytes in workspaces.seen:
        assert lstm_workspace_bytes(*given) == nbytes, given
