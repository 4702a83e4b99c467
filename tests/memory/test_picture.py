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
from shoestring.memory.picture import HEIGHT, Curve, draw_curves, thinned

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
