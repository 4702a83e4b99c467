"""Pictures are drawn from the predictions, to the byte, and are well-formed."""

import xml.etree.ElementTree as ElementTree
from html import unescape

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss
from shoestring.integrations.pages import plan_page
from shoestring.memory.picture import HEIGHT, Curve, draw_curves, draw_timeline, repeated, thinned
from shoestring.memory.timeline import ROLES, Role, Timeline

SVG = "{http://www.w3.org/2000/svg}"


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(scope="module")
def parts():
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(64, 4))
    batch = torch.randn(512, 64), torch.randint(4, (512,))
    return model, batch, {"loss": loss, "optimizer": "adamw"}


def test_a_thinned_curve_keeps_its_peak():
    totals = np.arange(5_000) % 4_321
    assert max(thinned(totals)) == 4_320 and len(thinned(totals)) == 400
    assert thinned(np.array([3, 1])) == (3, 1)


def test_a_thinned_curve_is_not_stretched():
    """Each value stands where its instants are, also where 431 are drawn as 400."""
    drawn = np.array(thinned(np.arange(431)))
    assert np.abs(drawn - np.linspace(0, 430, 400)).max() <= 2


def test_the_peak_is_marked_where_it_is_drawn():
    table = np.zeros((431, len(ROLES)), dtype=np.int64)
    table[:, 0], table[200, ROLES.index(Role.TRANSIENT)] = 10, 90
    timeline = Timeline((("operation", "forward", ""),) * 431, table, ())
    root = ElementTree.fromstring(draw_timeline(timeline, "t").svg)
    paths = {e.get("style", ""): e.get("d", "") for e in root.iter(f"{SVG}path")}
    edge = paths["fill:var(--transient)"].strip("MZ").split("L")
    points = [tuple(map(float, pair.split())) for pair in edge]
    top = min(y for _, y in points)
    at = [x for x, y in points if y == top]
    mark = float(
        next(d for style, d in paths.items() if "dasharray" in style).strip("M").split()[0]
    )
    assert min(at) <= mark <= max(at)


def test_a_profile_draws_its_roles(parts, tmp_path):
    model, batch, given = parts
    profile = ss.profile(model, batch, **given, accounting="device")
    drawn = profile.plot(tmp_path / "memory.svg")
    assert (tmp_path / "memory.svg").read_text() == drawn.svg
    texts = [e.text for e in ElementTree.fromstring(drawn.svg).iter(f"{SVG}text")]
    live = [r.value.replace("_", " ") for r, n in profile.bytes_by_role.items() if n]
    assert set(live) <= set(texts)
    assert drawn.svg in profile._repr_html_()


def test_a_plan_draws_both_steps_below_its_budget(parts, tmp_path):
    model, batch, given = parts
    plain = ss.profile(model, batch, **given, accounting="device").peak_bytes
    plan = ss.plan(model, batch, **given, budget=plain * 7 // 10, allow="lossless")
    for predicted in (plan.plain, plan.predicted):
        assert max(predicted.curve) == predicted.peak_bytes
    picture = plan.plot(tmp_path / "plan.svg")
    shown = " ".join(e.text or "" for e in ElementTree.fromstring(picture.svg).iter(f"{SVG}text"))
    assert "plain: peak" in shown and "planned: peak" in shown and "budget" in shown
    for page in (plan._repr_html_(), plan_page("tiny", plan)):
        assert picture.svg in page
        assert all(choice.why in unescape(page) for choice in plan.choices)


def test_every_microbatch_is_drawn(parts):
    """The peak comes once for each part of the batch."""
    model, batch, _ = parts
    plan = ss.plan(
        model, batch, loss=loss, optimizer="sgd-plain", budget="1 MB", accounting="fundamental",
        allow="lossless",
    )  # fmt: skip
    at_once, curve = plan.plan.at_once, plan.predicted.curve
    assert at_once is not None and max(curve) == plan.predicted.peak_bytes
    assert curve.count(max(curve)) % -(-512 // at_once) == 0


def test_of_a_thousand_microbatches_the_peak_is_drawn():
    drawn = repeated(np.arange(5_000), 1_000)
    assert len(drawn) == 1_000 and set(drawn) == {4_999}


def test_heights_are_in_proportion():
    drawn = draw_curves([Curve("a", (50, 100), "plain")], "t", budget_bytes=200).svg
    root = ElementTree.fromstring(drawn)
    line = next(e for e in root.iter(f"{SVG}path") if "stroke:var(--plain)" in e.get("style", ""))
    ys = [float(pair.split()[1]) for pair in line.get("d", "").strip("M").split("L")]
    budget = next(e for e in root.iter(f"{SVG}path") if e.get("class") == "budget")
    top = float(budget.get("d", "").split()[1].partition("H")[0])
    low, high = ys[0], ys[-1]
    floor = 2 * low - high  # 50 and 100 bytes: as far below the first as the second is above it
    assert floor == pytest.approx(HEIGHT - 34, abs=0.2)
    assert floor - top == pytest.approx(2 * (floor - high), abs=0.4)


def test_only_svg_is_written(tmp_path):
    with pytest.raises(ss.InputError, match=r"memory\.png"):
        draw_curves([Curve("a", (1, 2), "plain")], "t").save(tmp_path / "memory.png")
