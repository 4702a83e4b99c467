"""The page of a profile has the planned step, the plain one behind it, and every byte by module."""

import json
import re

import pytest
from test_browser import CHROMIUM, rendered

import shoestring as ss
from shoestring.lab.models import image_loss
from shoestring.lab.study.profile_page import profile_page
from tiny_nets import tiny_linear


@pytest.fixture(scope="module")
def profiles():
    import torch

    model = tiny_linear()
    batch = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    given = {"loss": image_loss, "optimizer": "sgd", "accounting": "device"}
    planned = ss.profile(model, batch, **given, techniques=[ss.Microbatching(2)])
    return planned, ss.profile(model, batch, **given)


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_both_steps_and_every_byte_are_in_it(profiles):
    planned, plain = profiles
    data = data_of(profile_page("tiny", planned, plain))
    assert sum(data["modules"].values()) == planned.peak_bytes == data["rows"][0]["memory"]
    assert data["behind"]["peak_bytes"] == plain.peak_bytes
    assert "(optimizer state)" in data["modules"]
    assert "behind" not in data_of(profile_page("tiny", plain))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: none on the PATH")
@pytest.mark.parametrize("width", [1280, 500])
def test_the_tree_opens_and_closes_by_keys(profiles, tmp_path, width):
    (tmp_path / "page.html").write_text(profile_page("tiny", *profiles))
    script = """
    const at = () => document.activeElement.dataset.module;
    const press = (name) => key(document.activeElement, name);
    document.querySelector("#modules [tabindex='0']").focus();
    press("ArrowDown");
    found.first = at();
    found.said = document.getElementById("modules-said").textContent;
    press("ArrowRight");
    found.second = at();
    press("Enter");
    found.opened = [...document.querySelectorAll("#modules .module")].map((n) => n.dataset.module);
    press("Escape");
    found.closed = document.querySelectorAll("#modules .module").length;
    found.plain = document.getElementById("plain-label").textContent;
    found.reached = document.querySelectorAll("#modules .module[tabindex='0']").length;
    """
    found = rendered(tmp_path / "page.html", tmp_path, script, width=width)
    assert found["first"] and found["first"] in found["said"] and "% of the peak" in found["said"]
    assert found["second"] and found["second"] != found["first"]
    assert found["opened"][:2] == ["", found["second"]]
    assert found["closed"] > len(found["opened"]) and found["reached"] == 1
    assert found["plain"].startswith("plain ")
