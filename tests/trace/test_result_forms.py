"""Results known by the form of their operands, as shape functions or kernels have them."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from shoestring.torch_private.fake_tensors import FakeTensor, FakeTensorMode, as_parameter
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


class Laid(TorchDispatchMode):
    """Notes how results of operations lie; of fake tensors those that a trace has."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fake = FakeTensor in types and not func._schema.is_mutable
        out = (results.result if fake else call)(func, args, kwargs or {})
        for each in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(each, torch.Tensor) and each.dim() > 1:
                where = zip(each.shape, each.stride(), strict=True)
                self.seen.append((str(func), [pair for pair in where if pair[0] > 1]))
        return out


def call(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "batch norm": lambda x: F.batch_norm(x, None, None, ones(x.shape[1]), ones(x.shape[1]), True),
    "statistics": lambda x: F.batch_norm(x, 0 * ones(x.shape[1]), ones(x.shape[1]), training=True),
    "instance norm": lambda x: F.instance_norm(x),
    "group norm": lambda x: F.group_norm(x, 2, ones(x.shape[1]), ones(x.shape[1])),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:], ones(x.shape[-1]), ones(x.shape[-1])),
    "softmax": lambda x: x.softmax(1), "log softmax": lambda x: x.log_softmax(-1),
    "gelu": F.gelu, "silu": F.silu, "mish": F.mish, "hardswish": F.hardswish, "elu": F.elu,
    "softplus": F.softplus, "log sigmoid": F.logsigmoid, "glu": lambda x: F.glu(x, 1),
    "prelu": lambda x: F.prelu(x, ones(1)), "linear": lambda x: F.linear(x, ones(6, x.shape[-1])),
    "product": lambda x: x @ x.transpose(-1, -2), "cat": lambda x: torch.cat([x, x], 1),
    "pad": lambda x: F.pad(x, (1, 1)), "where": lambda x: torch.where(x > 0, x, 0 * x),
    "cumsum": lambda x: x.cumsum(-1), "sort": lambda x: x.sort(-1)[0],
    "index": lambda x: x[:, torch.tensor([0, 1])], "roll": lambda x: x.roll(1, 1),
    "flip": lambda x: x.flip(1), "mean": lambda x: x.mean(1), "largest": lambda x: x.amax(1),
    "squares": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "smooth": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x)),
    "huber": lambda x: F.huber_loss(x, torch.zeros_like(x)),
    "entropy": lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x)),
    "divergence": lambda x: F.kl_div(x, torch.zeros_like(x), reduction="batchmean"),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
}  # fmt: skip
OF_IMAGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "convolution": lambda x: F.conv2d(x, ones(6, x.shape[1], 3, 3)),
    "transposed": lambda x: F.conv_transpose2d(x, ones(x.shape[1], 6, 2, 2), stride=2),
    "largest of": lambda x: F.max_pool2d(x, 2), "mean of": lambda x: F.avg_pool2d(x, 2),
    "adapted": lambda x: F.adaptive_avg_pool2d(x, 2), "unfolded": lambda x: F.unfold(x, 2),
    "resized": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "shuffled": lambda x: F.pixel_shuffle(x, 2),
    "reflected": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
}  # fmt: skip
ORDERS = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)]
OF_FOUR = [(0, 1, 2, 3), (0, 1, 3, 2), (0, 2, 1, 3), (0, 2, 3, 1)]


@pytest.mark.parametrize("name", [*FUNCTIONS, *OF_IMAGES])
def test_results_lie_as_the_cpu_lays_them(name: str) -> None:
    """Whoever reads a result that lies in another way makes a copy: the peak hangs on it."""
    function = {**FUNCTIONS, **OF_IMAGES}[name]
    for order in (*(ORDERS if name in FUNCTIONS else ()), *OF_FOUR):
        shape = (4, 6, 8) if len(order) == 3 else (4, 8, 6, 10)
        x = torch.randn([shape[d] for d in order])
        x = x.permute([order.index(d) for d in range(len(shape))])
        found = []
        for mode in (nullcontext(), FakeTensorMode(allow_non_fake_inputs=True)):
            given = x if isinstance(mode, nullcontext) else mode.from_tensor(x)
            with mode:
                given = given.detach().requires_grad_()
                with Laid() as laid:
                    out = function(given)
                    (out * torch.ones_like(out)).sum().backward()
            found.append(laid.seen)
        assert found[0] == found[1], order


class Typed(Laid):
    """Notes the types of results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fake = FakeTensor in types and not func._schema.is_mutable
        out = (results.result if fake else call)(func, args, kwargs or {})
        made = out if isinstance(out, (list, tuple)) else (out,)
        if func.namespace == "aten":
            kinds = [each.dtype for each in made if isinstance(each, torch.Tensor)]
            self.seen.append((str(func), kinds))
        return out


@pytest.mark.parametrize("name", ["batch norm", "statistics", "group norm", "layer norm", "squares",
                                  "smooth", "entropy", "divergence", "linear"])  # fmt: skip
def test_results_of_16_bits_have_the_types_the_cpu_gives_them(name: str) -> None:
    """GroupNorm under autocast: its weights are FP32, and so would its gradient be."""
    found = []
    for mode in (nullcontext(), FakeTensorMode()):
        with mode, torch.autocast("cpu", torch.bfloat16, name == "linear"):
            given = torch.ones(4, 8, 6, dtype=torch.bfloat16).requires_grad_()
            other = torch.zeros(4, 8, 6)
            with Typed() as typed:
                losses = {"squares": F.mse_loss, "smooth": F.smooth_l1_loss}
                out = losses[name](given, other) if name in losses else FUNCTIONS[name](given)
                out.float().sum().backward()
        found.append(typed.seen)
    assert found[0] == found[1]


def test_a_count_that_an_update_only_reads_is_not_asked_about_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each parameter has one, and its value changes nothing of an update that returns nothing."""
    asked: list[Any] = []
    plain = results._with_values

    def noting(func: Any, *given: Any) -> Any:
        asked.append(func)
        return plain(func, *given)

    monkeypatch.setattr(results, "_with_values", noting)
    monkeypatch.setattr(results, "_known", {})
    mode = FakeTensorMode()
    with mode:
        weight, gradient, first, second = (torch.empty(4, 6) for _ in range(4))
        count = torch.tensor(1.0)
    how = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8,
           "amsgrad": False, "maximize": False}  # fmt: skip
    add, update = aten._foreach_add_.Scalar, aten._fused_adamw_.default
    for _ in range(2):
        results.result(add, ([count], 1), {})
        results.result(update, ([weight], [gradient], [first], [second], [], [count]), how)
    assert asked == [add, update, add]
    assert isinstance(count, FakeTensor) and count.constant is not None
    assert float(count.constant) == 3.0


def test_a_fake_parameter_is_as_the_class_makes_it() -> None:
    with FakeTensorMode():
        made = torch.nn.Parameter(torch.empty(4, 6), requires_grad=False)
        given = as_parameter(torch.empty(4, 6), False)
        trained = as_parameter(torch.empty(4, 6), True)
    assert type(given) is type(made) and isinstance(given, torch.nn.Parameter)
    assert not given.requires_grad and trained.requires_grad and trained.is_leaf
