"""The wide residual network: its size, its arithmetic, and its names in the registry."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from reference.wide_resnet_functional import wide_resnet as reference
from shoestring.errors import InputError
from shoestring.lab.models import builtin, builtin_names
from shoestring.lab.models.wide_resnet import (
    ResidualBlock,
    Shortcut,
    WideResNet,
    blocks_per_group,
    wide_resnet,
)

PARAMETERS = {
    (28, 2): 1_456_858,
    (22, 2): 1_068_890,
    (16, 2): 680_922,
    (10, 2): 292_954,
    (28, 1.5): 821_466,
    (28, 1): 366_938,
    (28, 0.75): 207_498,
    (28, 0.5): 93_274,
    (10, 1): 75_290,
}


def counted(depth: int, width: float) -> int:
    """The parameters layer by layer, by hand: convolutions, BN (two a channel), linear."""
    blocks, channels = (depth - 4) // 6, [round(c * width) for c in (16, 32, 64)]
    total, before = 3 * 16 * 9, 16
    for after in channels:
        for c_in in [before] + [after] * (blocks - 1):
            total += 2 * c_in + 9 * c_in * after + 2 * after + 9 * after * after
        before = after
    return total + 2 * before + 10 * before + 10


def fp64_model(depth: int, width: float, shortcut: Shortcut = "strided") -> WideResNet:
    """A model whose BN parameters and statistics differ from their trivial start."""
    torch.manual_seed(0)
    model = wide_resnet(depth, width, shortcut=shortcut).double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
            assert module.running_mean is not None and module.running_var is not None
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model


@pytest.mark.parametrize(("depth", "width"), PARAMETERS)
def test_parameter_counts(depth: int, width: float) -> None:
    with torch.device("meta"):
        model = wide_resnet(depth, width)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[depth, width]
    assert PARAMETERS[depth, width] == counted(depth, width)


def test_block_convolutions_hold_the_reports_fraction() -> None:
    blocks = [m for m in wide_resnet(28, 2).modules() if isinstance(m, ResidualBlock)]
    weights = [c.weight for b in blocks for c in b.modules() if isinstance(c, nn.Conv2d)]
    assert len(blocks) == 12
    assert len(weights) == 24
    assert sum(w.numel() for w in weights) == 1_451_520
    assert round(20_000 / 1_451_520, 8) == 0.01377866


def test_elements_kept_for_backward_are_the_reports() -> None:
    kept = {"inputs": 0, "relu": 0}

    def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        kept["relu" if isinstance(module, nn.ReLU) else "inputs"] += inputs[0].numel()

    model = wide_resnet(28, 2).eval()
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d | nn.Linear | nn.ReLU):
            module.register_forward_pre_hook(count)
    with torch.no_grad():
        model(torch.zeros(1, 3, 32, 32))
    assert kept == {"inputs": 945_280, "relu": 475_136}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("depth", "width", "shortcut"),
    [(10, 2, "strided"), (10, 2, "pool"), (16, 1, "strided"), (10, 0.5, "strided")],
)
def test_forward_agrees_with_the_functional_reference(
    depth: int, width: float, shortcut: Shortcut, training: bool
) -> None:
    model = fp64_model(depth, width, shortcut).train(training)
    images = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    expected = reference(images, dict(model.state_dict()), depth, training, shortcut)
    with torch.no_grad():
        torch.testing.assert_close(model(images), expected, rtol=1e-9, atol=1e-9)


def test_gradients_agree_with_the_functional_reference() -> None:
    model = fp64_model(10, 0.5)
    images = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    parameters = dict(model.named_parameters())
    names, leaves = list(parameters), list(parameters.values())
    actual = torch.autograd.grad(model(images).square().sum(), leaves)
    scores = reference(images, parameters, 10, training=True)
    expected = torch.autograd.grad(scores.square().sum(), leaves)
    for name, mine, theirs in zip(names, actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.parametrize("shortcut", ["strided", "pool"])
@pytest.mark.parametrize("side", [32, 9])
def test_shapes(shortcut: Shortcut, side: int) -> None:
    model = wide_resnet(10, 0.5, num_classes=7, shortcut=shortcut)
    assert model(torch.randn(2, 3, side, side)).shape == (2, 7)


def test_shortcut_of_the_first_block_only_appends_zero_channels() -> None:
    block = wide_resnet(10, 2).group1[0]
    assert isinstance(block, ResidualBlock)
    x = torch.randn(1, 16, 4, 4)
    y = block.shortcut(x)
    assert y.shape == (1, 32, 4, 4)
    assert torch.equal(y[:, :16], x) and not y[:, 16:].any()


def test_an_equal_shape_shortcut_is_the_input_itself() -> None:
    block = ResidualBlock(16, 16)
    x = torch.randn(1, 16, 4, 4)
    assert block.shortcut(x) is x


def test_convolutions_start_from_kaiming_fan_out() -> None:
    torch.manual_seed(0)
    model = wide_resnet(10, 4)
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 10_000:
            expected = (2 / (9 * module.out_channels)) ** 0.5
            assert module.bias is None
            assert module.weight.std().item() == pytest.approx(expected, rel=0.05)


def test_a_few_steps_reduce_the_loss() -> None:
    torch.manual_seed(0)
    entry = builtin("wrn-10-0.5")
    images, labels = entry.batch(8)
    model, batch = entry.build(), (images[:, :, ::4, ::4], labels)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = entry.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_a_step_on_fake_tensors() -> None:
    entry = builtin("wrn-28-2")
    with FakeTensorMode():
        model, batch = entry.build(), entry.batch(entry.default_batch)
        loss = entry.loss(model, batch)
        loss.backward()
        assert isinstance(loss, FakeTensor)
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_registry_entry() -> None:
    entry = builtin("wrn-28-0.75")
    assert (entry.name, entry.default_batch) == ("wrn-28-0.75", 100)
    assert (entry.batch_unit, entry.default_optimizer) == ("images", "sgd")
    images, labels = entry.batch(5)
    assert images.shape == (5, 3, 32, 32) and images.dtype == torch.float32
    assert labels.shape == (5,) and labels.dtype == torch.int64
    with torch.device("meta"):
        assert sum(p.numel() for p in entry.build().parameters()) == PARAMETERS[28, 0.75]


def test_every_listed_name_is_known() -> None:
    assert {"wrn-28-2", "wrn-10-1", "dc-transformer"} <= set(builtin_names())
    assert [builtin(name).name for name in builtin_names()] == builtin_names()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("wrn-27-2", "22 or 28"),
        ("wrn-4-2", "try 10"),
        ("wrn-28-0", "0.75"),
        ("wrn-28-0.01", "0.75"),
        ("wrn-28", "wrn-28-2"),
        ("WRN-28-2", "wrn-28-2"),
        ("wrn-28--2", "wrn-28-2"),
        ("vgg", "dc-transformer"),
        ("", "wrn-28-2"),
    ],
)
def test_bad_names_say_the_way_out(name: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        builtin(name)
    assert hint in str(caught.value.hint)


def test_bad_arguments() -> None:
    assert blocks_per_group(28) == 4
    for width in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError):
            wide_resnet(28, width)
    with pytest.raises(InputError, match="shortcut"):
        wide_resnet(10, 1, shortcut="conv")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="0 images"):
        builtin("wrn-10-1").batch(0)
