"""The API reference has every public name, with Args, Returns and Examples that run."""

import ast
import doctest
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
import typing
import warnings
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import shoestring as ss
from shoestring import errors
from shoestring.techniques import registry

ROOT = Path(__file__).parents[1]
NAMES = re.findall(r"^::: shoestring\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
WRITTEN = {
    node.name
    for path in (ROOT / "src").rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.ClassDef)
} - {"Kind"}  # of `register`, a type variable
FUNCTIONS = [n for n in ss.__all__ if inspect.isfunction(getattr(ss, n))]
CLASSES = [n for n in ss.__all__ if inspect.isclass(getattr(ss, n))]


def test_it_has_the_public_names_once_each():
    assert sorted(NAMES) == sorted(set(ss.__all__) - {"__version__"})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_classes_it_takes_and_gives_are_public(name):
    signature = inspect.signature(getattr(ss, name))
    annotations = [p.annotation for p in signature.parameters.values()]
    words = set(re.findall(r"\w+", " ".join(map(str, [*annotations, signature.return_annotation]))))
    assert words & WRITTEN <= set(ss.__all__)


def test_there_are_functions():
    assert {"profile", "measure", "plan", "apply", "fit", "verify"} <= set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_explains_its_arguments_and_shows_an_example(name):
    function = getattr(ss, name)
    text = inspect.getdoc(function) or ""
    sections = dict(
        re.findall(r"^(Args|Returns|Raises|Examples):\n((?:    .*\n?|\n)+)", text, re.M)
    )
    assert {"Args", "Returns", "Examples"} <= set(sections)
    explained = re.findall(r"^    (\w+):", sections["Args"], re.M)
    assert explained == list(inspect.signature(function).parameters)
    assert "ss." in sections["Examples"]


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_shows_an_example_and_explains_what_it_takes_or_has(name):
    kind = getattr(ss, name)
    text = inspect.getdoc(kind) or ""
    assert "\nExamples:\n    >>> " in text
    explained = _explained(text)
    if explained:  # it is made by calling it
        assert explained == list(inspect.signature(kind).parameters)
        return
    assert not issubclass(kind, ss.Technique) or not inspect.signature(kind).parameters
    source = inspect.getsource(kind)
    for field in fields(kind) if is_dataclass(kind) else ():
        if field.name in kind.__annotations__:  # the others are of what it derives from
            assert re.search(rf'^    {field.name}: .*\n    """', source, re.M), field.name


@pytest.mark.parametrize("name", CLASSES)
def test_methods_say_what_they_do_and_explain_their_arguments(name):
    kind = getattr(ss, name)
    for method, made in vars(kind).items():
        function = getattr(made, "__func__", made)
        if not inspect.isfunction(function) or method.startswith("_"):
            continue
        text = inspect.getdoc(function)
        assert text, f"{name}.{method}"
        if not issubclass(kind, ss.Technique):  # its contract is in docs/adding-a-technique.md
            taken = [n for n in inspect.signature(function).parameters if n not in ("self", "cls")]
            assert _explained(text) == taken, f"{name}.{method}"


FREE = {
    "budget": "a size",
    "allow": "names with commas",
    "optimizer": "a name of PyTorch's, in small letters",
    "accept": "rows of a certificate, the plan's own among them",
    "model": "a configuration",
    "name": "a configuration",
    "dtype": "a name of PyTorch's",
    "lora": "settings, as on the command line",
    "quantize": "settings, as on the command line",
    "sizes": "sizes",
    "weight": "labels, examples or a count of your own",
    "strategy": "'every-4', with a number",
    "method": "a method and its settings",
    "blocks": "modules of the model",
    "tensors": "tensors of the model",
    "schedule": "what each block does, as a plan prints it",
    "folder": "a path",
    "units": "labels, examples or a count of your own",
    "message": "text",
    "hint": "text",
}
"""Arguments that take any text; all others that take text name their options."""


@pytest.mark.parametrize("name", sorted({*FUNCTIONS, *(t.__name__ for t in
                         (ss.Clip, ss.Parallel, *ss.Technique.__subclasses__()))}))  # fmt: skip
def test_named_options_are_literals(name):
    made = getattr(ss, name)
    kinds = typing.get_type_hints(made if inspect.isfunction(made) else made.__init__)
    for taken in set(inspect.signature(made).parameters) - set(FREE):
        assert str not in (kinds[taken], *typing.get_args(kinds[taken])), (name, taken)


def test_common_arguments_come_in_one_order():
    taken = [inspect.signature(getattr(ss, name)).parameters for name in FUNCTIONS]
    orders = [[n for n, p in of.items() if p.kind is p.KEYWORD_ONLY] for of in taken]
    for first, second in itertools.combinations(orders, 2):
        common = [n for n in first if n in second]
        assert common == [n for n in second if n in first]


def test_every_error_and_warning_is_public():
    own = [n for n, kind in vars(errors).items() if inspect.isclass(kind)]
    assert {n for n in own if issubclass(getattr(errors, n), Exception)} <= set(ss.__all__)


def results():
    """One of each, by what they are returned from."""
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(8, 8)
    data = batch, torch.randint(8, (8,))
    given = {"loss": loss, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}
    profile = ss.profile(model, data, **given)
    certificate = ss.verify([ss.Microbatching(4)], model, [data], **given, steps=1)
    plan = ss.plan(model, data, **given, budget="8 GB", prices=True)
    card = ss.CardFit(24 * 10**9, "24 GB", "", 10**9, plan.plan, 1.2, 4, None)
    effects = (ss.Effect("--microbatch 1", False, 2, 1),)
    return [
        profile, profile.timeline, ss.measure(model, data, **given),
        certificate, *certificate.comparisons, ss.Comparison("loss", ss.Level.EQUAL,
                                                             ss.Level.NEAR, float("inf")),
        plan.predicted, *plan.front, *plan.prices, ss.Choice("offload", "", "lossless", "why"),
        ss.Trial(1, 0.5, False), card, ss.Cards("a", "b", 2, 1, (card,)),
        *effects, ss.Explanation(2, "backward", "mm", {"model": 1}, effects),
    ]  # fmt: skip


def test_every_result_is_read_back_from_json():
    seen = set()
    for result in results():
        plain = json.loads(json.dumps(result.to_dict(), allow_nan=False))
        again = type(result).from_dict(plain)
        seen.add(type(result))
        if not isinstance(result, (ss.MemoryProfile, ss.Timeline)):  # they hold arrays
            assert again == result
        assert again.to_dict() == result.to_dict()
        with pytest.raises(ss.InputError, match=f"not a {type(result).__name__}"):
            type(result).from_dict({**plain, "other": 1})
    shown = {k for k in map(ss.__dict__.get, CLASSES) if k is not None and is_dataclass(k)}
    plans = {ss.Plan, ss.BudgetPlan}
    settings = {ss.Clip, ss.Parallel, ss.Configured, *ss.Technique.__subclasses__()}
    assert shown - plans - settings == seen


def test_what_results_hold_is_public():
    hold = {type(r) for r in results()} | {ss.BudgetPlan}
    words = " ".join(str(f.type) for kind in hold for f in fields(kind))
    internal = {"Change"}  # what `Timeline` adds up
    assert set(re.findall(r"\w+", words)) & WRITTEN - internal <= set(ss.__all__)


def _explained(text):
    section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", text, re.M)
    return re.findall(r"^    (\w+):", section[1], re.M) if section else []


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@cache
def a_plan():
    model, batch = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(16, 16)
    labels = torch.randint(16, (16,))
    return ss.plan(model, (batch, labels), loss=loss, optimizer="sgd", budget="8 GB")


SLOW = {"Cards", "CardFit", "Configured", "explain", "Explanation", "Effect", "BudgetError"}
RUN = [n for n in FUNCTIONS + CLASSES if n not in ("cards", "will_it_fit")]  # as in their classes


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in RUN]
)
def test_an_example_runs(name, tmp_path, monkeypatch):
    """On a tiny model; numbers in examples are those of others."""
    monkeypatch.setattr(registry, "_known", dict(registry._known))
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    batch = torch.randn(16, 64), torch.randint(64, (16,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    text = inspect.getdoc(getattr(ss, name))
    text = text.replace("hf:examples", f"hf:{ROOT / 'examples'}")
    names = {"model": model, "batch": batch, "loss": loss, "optimizer": optimizer, "ss": ss}
    names |= {"plan": a_plan(), "loader": [batch], "dataclass": dataclass, "warnings": warnings}
    with warnings.catch_warnings():
        for example in doctest.DocTestParser().get_examples(text):
            exec(compile(example.source, name, "single"), names)


def test_every_page_is_in_the_navigation():
    """`make docs` finds the same, with mkdocs; this needs nothing."""
    listed = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = [p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")]
    kinds = (ROOT / "src" / "shoestring" / "techniques").glob("*/README.md")
    pages += [f"techniques/{path.parent.name}.md" for path in kinds]
    for page in pages:
        assert re.search(rf"[ :] ?{re.escape(page)}$", listed, re.M), page


def test_what_builds_the_site_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = (ROOT / "constraints.txt").read_text()
    for line in project["optional-dependencies"]["docs"]:
        assert re.search(rf"^{line.partition('[')[0]}==", pins, re.M), line


def test_names_are_imported_when_used_from_where_type_checkers_see_them():
    tree = ast.parse((ROOT / "src" / "shoestring" / "__init__.py").read_text())
    seen = {
        (node.module, alias.name)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {(module, name) for name, module in ss._MODULES.items()}
    assert {name for _, name in seen} < set(ss.__all__) <= set(dir(ss))
    with pytest.raises(AttributeError, match="no attribute 'plon'"):
        _ = ss.plon


def test_importing_it_imports_nothing_else():
    """`import shoestring` is to add at most 0.3 s to `import torch`: it imports no stage at all."""
    code = (
        "import sys, shoestring; print([m for m in sys.modules if m.startswith(('shoe', 'torch'))])"
    )
    paths = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=paths, capture_output=True, text=True, check=True
    )
    assert set(ast.literal_eval(done.stdout)) == {
        "shoestring",
        "shoestring.errors",
        "shoestring.version",
    }


def test_the_version_is_the_same_everywhere():
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)
    released = re.search(r"^## (\d\S*) \(", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert cited is not None and released is not None
    assert cited[1] == released[1] == ss.__version__
