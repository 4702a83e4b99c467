"""Figures of rows that were made up: what stands where, and that nothing is covered or cut."""

import io
import itertools
import re
import struct
from pathlib import Path

import pytest
from studies import made_up

from shoestring.errors import InputError
from shoestring.lab.study import figures
from shoestring.lab.study.results import Row
from shoestring.lab.study.spec import load
from shoestring.lab.study.statistics import Sample
from tiers import slow_but

pytest.importorskip("matplotlib")
PAPER = Path(__file__).parents[3] / "studies" / "paper"


def canvas(found, draw=figures._lines):
    """The figure as matplotlib has it."""
    with figures._drawing() as make:
        made = draw(make, found, found.study.figures[0])
        made.savefig(io.BytesIO(), format="png")
        return made


def many(count, **figure):
    """One point and one of the source's for each of so many densities."""
    rows = [
        ({"density": (i + 1) / 100}, {"counted_bytes": 1e6 * (i + 1), "score": 90.0 + i / count})
        for i in range(count)
    ]
    targets = [
        {"where": dict(settings), "score": 90.5, "interval": 0.1} for settings, _ in rows[::2]
    ]
    return made_up(rows, {"series": "density", "log_x": True, **figure}, target=targets)


@pytest.mark.parametrize("count", [2, 12, 40])
def test_a_legend_covers_nothing_and_is_not_cut(count):
    found = many(count)
    made = canvas(found)
    (axes,) = made.axes
    box = axes.get_legend().get_window_extent()
    assert len(axes.get_legend().get_texts()) == count + count // 2
    assert not box.overlaps(axes.get_window_extent())
    kept = made.get_tightbbox()  # what savefig writes, in inches
    x0, y0, x1, y1 = (side / made.dpi for side in box.extents)
    near = 0.01
    assert kept.x0 - near < x0 and x1 < kept.x1 + near
    assert kept.y0 - near < y0 and y1 < kept.y1 + near
    files = figures.figures(found)
    width, height = struct.unpack(">II", files["figure.png"][16:24])
    assert width > kept.width * 200 and height > kept.height * 200
    size = re.search(rb'width="([\d.]+)pt" height="([\d.]+)pt"', files["figure.svg"])
    assert float(size[1]) > kept.width * 72 and float(size[2]) > kept.height * 72


def test_no_two_series_look_alike():
    points = [container.lines[0] for container in canvas(many(40)).axes[0].containers]
    ours = [(n.get_color(), n.get_marker()) for n in points if n.get_linestyle() != ":"]
    assert len(ours) == len(set(ours)) == 40, "also where no line joins them"


def test_the_baseline_is_no_point_of_the_curve_of_its_density():
    (figure,) = load(PAPER / "pareto.toml").figures
    given = [{"density": 1.0, "precision": precision} for precision in ("fp32", "fp16")]
    rows = [Row(settings, {}, (), None, None, Sample(0, None, None)) for settings in given]
    assert len(figures.series_of(rows, figure.series)) == 2


def front(found):
    """The points that the figure calls Pareto-optimal."""
    (line,) = (n for n in canvas(found).axes[0].get_lines() if n.get_label() == "Pareto-optimal")
    assert line.get_marker() == "o", "one point alone is seen as well"
    return list(zip(*line.get_data(orig=True), strict=True))


QUANTITIES = [
    {"counted_bytes": 1e6, "measured_bytes": 4e6, "score": 90.0, "reduction": 4.0, "seconds": 9.0},
    {"counted_bytes": 2e6, "measured_bytes": 3e6, "score": 92.0, "reduction": 2.0, "seconds": 5.0},
    {"counted_bytes": 4e6, "measured_bytes": 5e6, "score": 91.0, "reduction": 1.0, "seconds": 7.0},
]
FRONTS = {
    ("counted_bytes", "score"): [(1, 90), (2, 92)],
    ("measured_bytes", "score"): [(3, 92)],
    ("reduction", "score"): [(4, 90), (2, 92)],
    ("counted_bytes", "seconds"): [(1, 9), (2, 5)],
}


@pytest.mark.parametrize("axes", FRONTS, ids="-".join)
def test_a_front_is_that_of_the_axes(axes):
    rows = [({"density": 0.1 * i}, quantities) for i, quantities in enumerate(QUANTITIES, 1)]
    x, y = axes
    assert front(made_up(rows, {"kind": "front", "x": x, "y": y})) == FRONTS[axes]


@pytest.mark.parametrize("name", ["density", "n"])
def test_no_front_of_what_is_neither_good_nor_bad(name):
    found = made_up([({"density": 0.5}, {"score": 90.0, "n": 2})], {"kind": "front", "x": name})
    with pytest.raises(InputError, match=f"figure 'figure'.* {name} is better"):
        figures.figures(found)


def test_text_on_the_x_axis_is_drawn_as_categories():
    scores = {"narrow": 91.0, "wide": 93.0, "broad": 92.0}
    rows = [({"family": name}, {"score": score}) for name, score in scores.items()]
    target = [{"where": {"family": "wide"}, "score": 94.0}]
    found = made_up(rows, {"x": "family", "log_x": True}, target=target)
    (axes,) = canvas(found).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == list(scores)
    ours, others = (container.lines[0] for container in axes.containers)
    assert list(zip(*ours.get_data(), strict=True)) == [(0, 91), (1, 93), (2, 92)]
    assert list(zip(*others.get_data(), strict=True)) == [(1, 94)]
    assert ours.get_linestyle() == others.get_linestyle() == "None", "nothing lies between them"


def test_text_on_the_y_axis_is_an_error_that_names_the_figure():
    found = made_up([({"family": "wide"}, {"score": 90.0})], {"x": "score", "y": "family"})
    with pytest.raises(InputError, match="figure 'figure': y has to be a number, and family is"):
        figures.figures(found)


@pytest.mark.parametrize("count", slow_but(2, [1, 3, 27]))
def test_pies_stand_in_rows_and_apart(count):
    sizes = {"model_bytes": 2e6, "optimizer_bytes": 3e6, "activation_bytes": 4e6}
    words = "a rather long name of a setting, residual-2*, microbatch 10"
    rows = [({"family": f"{words}, {i}"}, {"counted_bytes": 9e6, **sizes}) for i in range(count)]
    found = made_up(rows, {"kind": "pie", "title": "Shares"})
    made = canvas(found, figures._pies)
    assert len(made.axes) == count
    boxes = [axes.get_tightbbox() for axes in made.axes]
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other), "titles and legends as well"
    width, height = struct.unpack(">II", figures.figures(found)["figure.png"][16:24])
    assert width < 3600 and height < 700 * -(-count // 4)
