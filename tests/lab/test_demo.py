"""The demo leaves its report, and the plan cuts the measured peak by 20 or more."""

import pytest
import torch

from shoestring.lab.demo import demo
from shoestring.lab.records.run import read


@pytest.mark.slow
def test_the_demo_in_short(tmp_path, capsys):
    threads = torch.get_num_threads()
    try:
        shown = demo(tmp_path, epochs=1)
    finally:
        torch.set_num_threads(threads)
    ends = [read(tmp_path / name)[-1] for name in ("plain", "planned")]
    assert ends[0]["measured_peak_bytes"] >= 20 * ends[1]["measured_peak_bytes"]
    for end in ends:
        assert abs(end["predicted"]["step_peak_bytes"] / end["measured_peak_bytes"] - 1) < 0.02
    report = (tmp_path / "report.md").read_text()
    assert shown in report and "× less" in shown
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"
