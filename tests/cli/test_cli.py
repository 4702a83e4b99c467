"""The command line: what it prints where, its exit status, and one line for every mistake."""

import json
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoestring import __version__
from shoestring.cli.main import main

SOURCE = Path(__file__).parents[2] / "src"
KEYS = """
    model_bytes gradient_bytes optimizer_state_bytes forward_activation_bytes
    backward_activation_bytes transient_bytes peak_bytes forward_flops backward_flops
    recompute_flops
""".split()
FACTORIES = """
    import sys
    import time

    import torch
    from torch import nn


    def build():
        print("the user's own words")
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


    def slow():
        time.sleep(1.3)
        return build()


    def lazy():
        import cli_beside

        return cli_beside.build()


    def words():
        return nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))


    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, *, first, second):
            return {"out": self.layer(first) * second, "index": second}


    class Positions(nn.Linear):
        def forward(self, x):
            return super().forward(x).argmax(-1)


    def positions():
        return Positions(4, 2)


    def raises():
        raise OSError("no such file: weights.pt\\nand a second line")


    def leaves():
        sys.exit(3)


    def a_number():
        return 3


    def takes_one(width):
        return nn.Linear(width, 2)


    def frozen():
        return nn.Linear(4, 2).requires_grad_(False)


    def square(model, batch):
        return model(*batch).square().mean()


    def not_reduced(model, batch):
        return model(*batch).mean(0)


    def fails(model, batch):
        raise ValueError("the loss has no such key\\nand a second line")


    def no_number(model, batch):
        return 0.5


    def moved():
        return build().to("cpu").bfloat16()


    def of_values():
        assert build()[0].weight.detach().numpy().std() > 0
        return build()


    def pair():
        return build(), square


    a_model = nn.Linear(4, 2)
    constant = 5
"""


@dataclass(frozen=True)
class Ran:
    """What a call left behind."""

    status: int
    out: str
    err: str

    @property
    def said(self) -> list[str]:
        """Lines on stderr that are not progress: a busy machine may take more than a second."""
        return [line for line in self.err.splitlines() if not line.startswith("tracing ")]

    @property
    def data(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        assert self.status == 0, self.err
        assert self.out.count("\n") == 1
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture(scope="module")
def factories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on the import path with the module `cli_factories`."""
    folder = tmp_path_factory.mktemp("factories")
    (folder / "cli_factories.py").write_text(textwrap.dedent(FACTORIES))
    (folder / "cli_broken.py").write_text("import a_package_nobody_has\n")
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("cli_factories", None)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the command line in this process."""

    def call(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["shoestring", *arguments])
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main() replaces it
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        captured = capsys.readouterr()
        return Ran(int(left.value.code or 0), captured.out, captured.err)

    return call


def run_process(*arguments: str, folder: Path | None = None) -> Ran:
    """Call the command line as a user does."""
    done = subprocess.run(
        [sys.executable, "-m", "shoestring", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def test_version(run: Run) -> None:
    ran = run("--version")
    assert (ran.status, ran.out, ran.err) == (0, f"shoestring {__version__}\n", "")


def test_help_has_examples(run: Run) -> None:
    ran = run("--help")
    assert ran.status == 0
    assert "shoestring profile wrn-28-2" in ran.out and "shoestring doctor" in ran.out
    for task in ("See where memory goes", "Fit a budget or a card", "Train", "This machine"):
        assert task in ran.out
    ran = run("profile", "--help")
    assert ran.status == 0
    assert "shoestring profile wrn-28-2 --density 0.3 --precision fp16" in ran.out
    assert "shoestring profile mypackage.models:build --input 8x3x224x224" in ran.out
    for option in ("--density", "--precision", "--microbatch", "--checkpoint", "--json"):
        assert option in ran.out
    assert "residual-M*" in ran.out and "recompute*9" in ran.out, "stars are no emphasis"


def test_without_arguments_help_is_shown(run: Run) -> None:
    ran = run()
    assert ran.status == 2
    assert "Usage" in ran.out + ran.err


@pytest.mark.slow
def test_profile_as_a_process() -> None:
    ran = run_process("profile", "wrn-28-2")
    assert ran.status == 0
    assert ran.said == []
    assert "404.8 MB" in ran.out
    assert "1,456,858 parameters, 1,451,520 of them sparsifiable" in ran.out
    assert "fundamental accounting" in ran.out


def test_a_mistake_as_a_process(factories: Path) -> None:
    """PyTorch logs a traceback for shapes that do not fit: none of it may come through."""
    ran = run_process("profile", "cli_factories:build", "--input", "2x5", folder=factories)
    assert ran.status == 2
    assert ran.out == ""
    assert len(ran.said) == 3, ran.err
    assert ran.said[0] == "the user's own words"
    assert ran.said[1].startswith("InputError: the model failed on this batch: ")
    assert "[2, 5]" in ran.said[1]
    assert ran.said[2].startswith("hint: ")


def test_a_factory_that_imports_what_lies_beside_it(
    run: Run, factories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the current folder alone, and only when it is called."""
    (tmp_path / "cli_beside.py").write_text("from cli_factories import build\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    ran = run("profile", "cli_factories:lazy", "--input", "6x4", "--json")
    assert ran.data["parameters"] == 4 * 8 + 8 + 8 * 2 + 2
    assert sys.path == before


@pytest.mark.slow
def test_a_setting_without_effect_warns_on_stderr(factories: Path) -> None:
    code = "import torch\ndef build():\n    return torch.nn.BatchNorm1d(4)\n"
    (factories / "cli_only_norm.py").write_text(code)
    ran = run_process(
        "profile", "cli_only_norm:build", "--input", "8x4", "--density", "0.5", folder=factories
    )
    assert ran.status == 0
    assert ran.said == ["warning: density 0.5: the model has no tensor to sparsify"]
    assert "warning" not in ran.out


def test_profile_table(run: Run) -> None:
    ran = run("profile", "wrn-28-2")
    lines = [line.split() for line in ran.out.splitlines()]
    assert ["peak", "404.8", "MB"] in lines
    assert ["forward", "activation", "384.0", "MB", "94.9%"] in lines
    assert ["model", "5.8", "MB", "1.4%"] in lines
    assert "backward" in ran.out
    assert "FLOPs" in ran.out


def test_profile_json(run: Run) -> None:
    data = run("profile", "wrn-28-2", "--json").data
    assert set(KEYS) <= set(data)
    for key in KEYS:
        assert type(data[key]) is int, key
    # (945,280 + 475,136 / 32 + 8,192) × 4 × 100 + 3 × 4 × 1,456,858, by hand.
    assert data["peak_bytes"] == 404_810_296
    assert data["model_bytes"] == data["gradient_bytes"] == 4 * 1_456_858
    assert data["optimizer_state_bytes"] == 4 * 1_456_858
    # The loss keeps 10 log-probabilities and a label an image until its own gradient is taken. At
    # the peak the classifier's input has gone and its gradient, 128 numbers, is there.
    kept = 100 * (4 * 945_280 + 475_136 // 8)
    assert data["stored_activation_bytes"] == kept + 100 * (4 * 10 + 8)
    assert data["forward_activation_bytes"] == kept - 100 * 4 * 128
    assert data["backward_activation_bytes"] == 100 * 4 * (8_192 + 128)
    assert data["recompute_flops"] == 0
    assert data["model"] == "wrn-28-2"
    assert (data["batch"], data["batch_unit"], data["optimizer"]) == (100, "images", "sgd")
    assert adds_up(data)


def adds_up(data: dict[str, Any]) -> bool:
    """The roles sum to the peak, and so do the modules."""
    roles = (
        "model buffer input gradient optimizer_state forward_activation backward_activation "
        "transient workspace"
    ).split()
    total = sum(data[f"{role}_bytes"] for role in roles)
    return total == data["peak_bytes"] == sum(data["modules"].values())


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ("", "42.6 MB"),
        ("--microbatch 10", "12.2 MB"),
        ("--microbatch 10 --density 0.3", "6.7 MB"),
    ],
)
def test_technique_flags(run: Run, flags: str, shown: str) -> None:
    ran = run(*"profile wrn-28-2 --precision fp16 --checkpoint residual-2*".split(), *flags.split())
    assert ran.status == 0, ran.err
    assert ["peak", *shown.split()] in [line.split() for line in ran.out.splitlines()]
    assert "recomputed" in ran.out


def test_flags_reach_the_json(run: Run) -> None:
    flags = "--batch 20 --microbatch 5 --density 0.5 --precision bf16 --checkpoint no-bn"
    data = run("profile", "wrn-10-1", "--optimizer", "adam", *flags.split(), "--json").data
    expected = {
        "batch": 20,
        "microbatch": 5,
        "density": 0.5,
        "precision": "bf16",
        "checkpoint": "no-bn",
        "optimizer": "adam",
    }
    assert {key: data[key] for key in expected} == expected
    assert data["recompute_flops"] > 0
    assert adds_up(data)


def test_no_optimizer_has_no_state(run: Run) -> None:
    data = run("profile", "wrn-10-1", "--optimizer", "none", "--json").data
    assert data["optimizer_state_bytes"] == 0
    assert data["gradient_bytes"] == data["model_bytes"] > 0


@pytest.mark.slow
def test_dc_transformer_counts_tokens(run: Run) -> None:
    flags = "--microbatch 250 --checkpoint residual-1 --json"
    data = run("profile", "dc-transformer", *flags.split()).data
    assert (data["batch"], data["batch_unit"], data["optimizer"]) == (4000, "tokens", "adam")
    assert data["optimizer_state_bytes"] == 2 * data["model_bytes"] == 2 * 4 * 38_685_184
    assert adds_up(data)


def test_accounting_device(run: Run) -> None:
    """The device counts what the report leaves out: the batch, buffers, temporaries."""
    ideal = run("profile", "wrn-10-1", "--json").data
    cpu = run("profile", "wrn-10-1", "--accounting", "device", "--json").data
    cuda = run(*"profile wrn-10-1 --accounting device --device cuda --json".split()).data
    assert (cpu["device"], cuda["device"]) == ("cpu", "cuda")
    # Images and labels; CUDA's allocator may round each up.
    assert cpu["input_bytes"] == 100 * (3 * 32 * 32 * 4 + 8)
    for data in (cpu, cuda):
        assert data["accounting"] == "device"
        assert data["input_bytes"] >= 100 * (3 * 32 * 32 * 4 + 8)
        assert data["buffer_bytes"] > 0
        assert data["peak_bytes"] > ideal["peak_bytes"]
        assert adds_up(data)
    shown = run("profile", "wrn-10-1", "--accounting", "device", "--device", "cuda")
    assert "device accounting for cuda" in shown.out


def test_the_device_takes_a_microbatch(run: Run) -> None:
    command = "profile wrn-10-1 --accounting device --json".split()
    whole, part = run(*command).data, run(*command, "--microbatch", "10").data
    assert part["input_bytes"] == whole["input_bytes"]  # all of it is there, a tenth runs at once
    assert part["forward_activation_bytes"] < whole["forward_activation_bytes"] / 5


@pytest.mark.usefixtures("factories")
class TestImported:
    """Models of the user's own, by the name of a factory and the shapes of its inputs."""

    def test_positional_input(self, run: Run) -> None:
        ran = run("profile", "cli_factories:build", "--input", "6x4", "--json")
        data = ran.data
        # 6 × (4 + 8) inputs of the two layers and 1 bit for each of 6 × 8 ReLU inputs; the peak
        # is where the gradient of the mean has grown to 6 × 2, then 6 × 8.
        assert data["parameters"] == 4 * 8 + 8 + 8 * 2 + 2
        assert data["model_bytes"] == 4 * data["parameters"]
        assert data["stored_activation_bytes"] == 4 * 6 * (4 + 8) + 6
        assert (data["batch"], data["batch_unit"], data["optimizer"]) == (6, "examples", "sgd")
        assert adds_up(data)

    def test_what_the_factory_prints_is_not_data(self, run: Run) -> None:
        ran = run("profile", "cli_factories:build", "--input", "6x4", "--json")
        assert ran.said == ["the user's own words"]
        assert "words" not in ran.out

    def test_named_inputs(self, run: Run) -> None:
        inputs = ("--input", "first=6x4", "--input", "second=6x2")
        data = run("profile", "cli_factories:Named", *inputs, "--json").data
        assert data["parameters"] == 4 * 2 + 2
        # The layer keeps its input, the product the layer's output and the second factor.
        assert data["stored_activation_bytes"] == 4 * 6 * (4 + 2)

    def test_type_of_an_input(self, run: Run) -> None:
        data = run("profile", "cli_factories:words", "--input", "6x3:int64", "--json").data
        # The embedding keeps its indices, the layer its input of width 4.
        assert data["stored_activation_bytes"] == 6 * 3 * (8 + 4 * 4)

    def test_batch_replaces_the_first_dimension(self, run: Run) -> None:
        command = "profile cli_factories:build --json --input".split()
        assert (
            run(*command, "2x4", "--batch", "6").data["peak_bytes"]
            == (run(*command, "6x4").data["peak_bytes"])
        )

    def test_microbatch(self, run: Run) -> None:
        command = "profile cli_factories:build --json --input".split()
        part = run(*command, "6x4", "--microbatch", "2").data
        assert (part["batch"], part["microbatch"]) == (6, 2)
        assert part["peak_bytes"] == run(*command, "2x4").data["peak_bytes"]

    def test_loss(self, run: Run) -> None:
        command = "profile cli_factories:build --input 6x4 --json".split()
        plain = run(*command).data["stored_activation_bytes"]
        squared = run(*command, "--loss", "cli_factories:square").data["stored_activation_bytes"]
        assert squared == plain + 4 * 6 * 2

    def test_a_model_that_the_factory_converts(self, run: Run) -> None:
        data = run("profile", "cli_factories:moved", "--input", "6x4:bfloat16", "--json").data
        assert data["model_bytes"] == 2 * data["parameters"]

    @pytest.mark.filterwarnings("always:.*built with memory")
    def test_a_factory_that_reads_values_gets_some(self, run: Run) -> None:
        plain = run("profile", "cli_factories:build", "--input", "6x4", "--json").data
        ran = run("profile", "cli_factories:of_values", "--input", "6x4", "--json")
        assert ran.data["peak_bytes"] == plain["peak_bytes"]
        assert "numpy() is not supported" in ran.err
        assert ran.err.endswith("it was built with memory for its weights\n")

    def test_progress_of_what_is_slow(self, run: Run) -> None:
        ran = run("profile", "cli_factories:slow", "--input", "6x4")
        assert ran.status == 0
        assert ran.err.splitlines()[0].startswith("tracing cli_factories:slow … ")
        assert "tracing" not in ran.out


MISTAKES = {
    "profile wnr-28-2": ("'wnr-28-2'", "wrn-28-2"),
    "profile no-such-model": ("'no-such-model'", "dc-transformer"),
    "profile wrn-27-2": ("27", "22 or 28"),
    "profile cli_factories:raises --input 2x4": (
        "cli_factories:raises raised OSError: no such file: weights.pt",
        "factory",
    ),
    "profile cli_factories:leaves --input 2x4": ("raised SystemExit: 3", "factory"),
    "profile cli_factories:a_number --input 2x4": ("returned int", "torch.nn.Module"),
    "profile cli_factories:takes_one --input 2x4": ("'width'", "without arguments"),
    "profile cli_factories:pair --input 2x4": ("returned tuple", "--loss"),
    "profile cli_factories:a_model --input 2x4": ("is a model", "function that returns it"),
    "profile models/my-own.py:build --input 2x4": ("'models/my-own'", "my-own:build, in the fold"),
    "cards cli_factories:build": ("not a configuration", "--input"),
    "profile cli_factories:nobody --input 2x4": ("no callable 'nobody'", "module:factory"),
    "profile cli_factories:constant --input 2x4": ("no callable 'constant'", "module:factory"),
    "profile no_such_module:build --input 2x4": ("'no_such_module'", "importable"),
    "profile cli_broken:build --input 2x4": ("'a_package_nobody_has'", "importable"),
    "profile :build --input 2x4": ("cannot import ''", "module:factory"),
    "profile cli_factories:build": ("shapes of its inputs", "--input"),
    "profile cli_factories:build --input 2x5": ("[2, 5] X [4, 8]", "training"),
    "profile cli_factories:build --input 2x4 --input 2x4": ("3 were given", "training"),
    "profile cli_factories:build --input x=2x4": ("'x'", "training"),
    "profile cli_factories:words --input 2x4": ("torch.float32", "training"),
    "profile cli_factories:build --input 2x4:int64": ("float32 and int64", "--input"),
    "profile cli_factories:build --input 2by4": ("'2by4'", "8x3x224x224"),
    "profile cli_factories:build --input 2x4:int7": ("'int7'", "int64"),
    "profile cli_factories:build --input 0x4": ("'0x4'", "1"),
    "profile cli_factories:build --input ٣x4": ("'٣x4'", "8x3x224x224"),
    "profile cli_factories:build --input 99999999999999999999x4": ("larger than a tensor", ""),
    "profile cli_factories:Named --input first=2x4 --input 2x2": ("some have none", "all or none"),
    "profile cli_factories:Named --input first=2x4 --input first=2x2": ("same name", "name"),
    "profile cli_factories:Named --input first=4x4 --input second=2x2 --microbatch 2": (
        "[2, 4]",
        "first dimension",
    ),
    "profile wrn-28-2 --microbatch 7": ("a batch of 100 does not divide", "5"),
    "profile cli_factories:build --input 8x4 --microbatch 3": ("a batch of 8 does not", "2"),
    "profile dc-transformer --microbatch 300": ("a batch of 4000 does not divide", "250"),
    "profile wrn-28-2 --microbatch 0": ("microbatch 0", ""),
    "profile wrn-28-2 --microbatch -3": ("microbatch -3", ""),
    "profile wrn-28-2 --batch 0": ("0", "from 1"),
    "profile wrn-28-2 --batch 99999999999999999999": ("99999999999999999999", "1,000,000,000"),
    "profile wrn-28-2 --batch many": ("'many'", "--help"),
    "profile wrn-28-2 --density 0": ("density 0 ", "0.3"),
    "profile wrn-28-2 --density 1.5": ("density 1.5 ", "0.3"),
    "profile wrn-28-2 --density nan": ("density nan", "(0, 1]"),
    "profile wrn-28-2 --density a-third": ("'a-third'", "--help"),
    "profile wrn-28-2 --checkpoint sqrt": ("'sqrt'", "residual-M*"),
    "profile wrn-28-2 --checkpoint every-0": ("'every-0'", "every-M"),
    "profile wrn-28-2 --precision fp8": ("'fp8'", "fp32, fp16, bf16"),
    "profile wrn-28-2 --optimizer sgdd": ("'sgdd'", "sgd"),
    "profile wrn-28-2 --accounting real": ("'real'", "fundamental, device"),
    "profile wrn-28-2 --device tpu": ("'tpu'", "cuda"),
    "profile wrn-28-2 --device cuda": ("of no device", "accounting 'device'"),
    "profile wrn-28-2 --accounting device --device tpu": ("'tpu'", "cuda"),
    "profile wrn-28-2 --input 2x3x32x32": ("wrn-28-2", "--batch"),
    "profile wrn-28-2 --loss cli_factories:square": ("wrn-28-2", "--batch"),
    "profile cli_factories:build --input 2x4 --checkpoint residual-2": ("residual-2", "every-M"),
    "profile cli_factories:frozen --input 2x4": ("none of the model's 2 parameters", "unfreeze"),
    "profile cli_factories:positions --input 2x4": ("no floating-point tensor", "--loss"),
    "profile cli_factories:build --input 2x4 --loss cli_factories:not_reduced": ("(2,)", ".mean()"),
    "profile cli_factories:build --input 2x4 --loss cli_factories:no_number": ("float", "scalar"),
    "profile cli_factories:build --input 2x4 --loss cli_factories:fails": (
        "the loss has no such key",
        "training",
    ),
    "profile cli_factories:build --input 2x4 --loss cli_factories": ("''", "module:function"),
    "profile wrn-28-2 --frobnicate": ("--frobnicate", "--help"),
    "profile wrn-28-2 --desnity 0.3": ("--density", "--help"),
    "profile wrn-28-2 --density": ("--density", "--help"),
    "profile wrn-28-2 wrn-10-1": ("wrn-10-1", "--help"),
    "profile": ("model", "--help"),
    "profit wrn-28-2": ("'profit'", "--help"),
}


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize("command", MISTAKES)
def test_mistakes(run: Run, command: str) -> None:
    """One line with the numbers, one with the way out, status 2, and nothing on stdout."""
    message, hint = MISTAKES[command]
    ran = run(*command.split())
    assert ran.status == 2
    assert ran.out == ""
    lines = [line for line in ran.said if line != "the user's own words"]
    assert len(lines) == 2, ran.err
    assert lines[0].startswith("InputError: ")
    assert message in lines[0]
    assert lines[1].startswith("hint: ")
    assert hint in lines[1]


def test_interruption(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shoestring.lab.target.resolve", stop)
    ran = run("profile", "wrn-10-1")
    assert (ran.status, ran.out, ran.said) == (130, "", ["stopped"])


@pytest.mark.slow
def test_a_reader_that_leaves_is_not_an_error() -> None:
    command = f"{sys.executable} -m shoestring plan --help | head -c 1"
    done = subprocess.run(
        ["bash", "-c", command], env={**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "200"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stderr == ""
