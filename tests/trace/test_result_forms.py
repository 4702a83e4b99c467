"""Results known by the form of their operands: those that PyTorch's shape functions have."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoestring.torch_private.fake_tensors import FakeTensorMode
from shoestring.trace import results

aten = torch.ops.aten


def operands(mode: FakeTensorMode) -> dict[str, torch.Tensor]:
    with mode:
        return {
            "a": torch.empty(4, 6), "b": torch.empty(6, 5), "t": torch.empty(6, 4).t(),
            "n": torch.empty(4, 6, dtype=torch.bfloat16), "i": torch.zeros(4, dtype=torch.int64),
            "x": torch.empty(2, 3, 8, 8), "w": torch.empty(5, 3, 3, 3),
        }  # fmt: skip


CALLS: list[Callable[[dict[str, Any]], tuple[Any, tuple[Any, ...]]]] = [
    lambda o: (aten.mm.default, (o["a"], o["b"])),
    lambda o: (aten.add.Tensor, (o["a"], o["n"])),
    lambda o: (aten.add.Tensor, (o["t"], 1)),
    lambda o: (aten.mul.Scalar, (o["i"], 1)),
    lambda o: (aten.mul.Scalar, (o["i"], 1.0)),
    lambda o: (aten.view.default, (o["a"], [2, 12])),
    lambda o: (aten.t.default, (o["a"],)),
    lambda o: (aten.slice.Tensor, (o["a"], 0, 1, 3)),
    lambda o: (aten.split.Tensor, (o["a"], 2)),
    lambda o: (aten.add_.Tensor, (o["a"], o["a"])),
    lambda o: (aten.native_layer_norm.default, (o["a"], [6], None, None, 1e-5)),
    lambda o: (aten.convolution.default,
               (o["x"], o["w"], None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
]  # fmt: skip


def form(out: Any, given: dict[str, torch.Tensor]) -> Any:
    if isinstance(out, (list, tuple)):
        return [form(each, given) for each in out]
    if not isinstance(out, torch.Tensor):
        return out
    names = {t.untyped_storage()._cdata: name for name, t in given.items()}
    return (
        tuple(out.shape), out.stride(), out.dtype, out.storage_offset(), out.device,
        names.get(out.untyped_storage()._cdata), out.untyped_storage().nbytes(),
        [name for name, t in given.items() if t is out],
    )  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_known_result_has_the_form_of_a_new_one(call: Any) -> None:
    results._known.clear()
    found = []
    for _ in range(3):
        mode = FakeTensorMode()
        given = operands(mode)
        func, args = call(given)
        with mode:
            found.append(form(results.result(func, args, {}), given))
    mode = FakeTensorMode()
    given = operands(mode)
    func, args = call(given)
    with mode:
        assert found == [form(func(*args), given)] * 3
    assert any(entry is not None for entry in results._known.values())


def test_what_changes_its_operand_is_worked_out_each_time() -> None:
    results._known.clear()
    for _ in range(2):
        mode = FakeTensorMode()
        with mode:
            tensor = torch.empty(2, 3)
            results.result(aten.resize_.default, (tensor, [4, 5]), {})
        assert tuple(tensor.shape) == (4, 5)


def test_a_refusal_of_a_shape_is_not_remembered() -> None:
    mode = FakeTensorMode()
    given = operands(mode)
    for _ in range(2):
        with mode, pytest.raises(RuntimeError):
            results.result(aten.mm.default, (given["a"], given["a"]), {})


def test_views_of_one_storage_are_not_mixed_up() -> None:
    """Of two operands in one storage it is not known whose view a result is."""
    for shared in (True, False):
        mode = FakeTensorMode()
        with mode:
            first = torch.empty(4)
            second = first.view(4) if shared else torch.empty(4)
            out = results.result(aten.add_.Tensor, (first, second), {})
        assert out is first
