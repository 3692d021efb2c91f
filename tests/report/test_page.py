"""report.html holds everything of a run in one file, and runs nothing that a model wrote."""

import json
import re

from bacr_jax.report.page import page
from report_world import evaluation, lines


def test_nothing_is_loaded_from_elsewhere_and_nothing_hostile_gets_through(run):
    found = page(run)
    assert "<script" not in found and "&lt;script&gt;" in found
    sources = re.findall(r'src="([^"]{0,22})', found)
    # Training curves, budgets, accuracy by budget, accuracy over steps.
    assert sources == ["data:image/png;base64,"] * 4
    assert not re.findall(r"https?:|<link|@import|url\(", found)


def test_a_run_under_way_has_a_report_too(run):
    lines(run / "eval.jsonl", [evaluation(0, "before", 0.2)])
    (run / "metrics.jsonl").unlink()
    found = page(run)
    assert "not finished" in found and "30.0 [20.0, 40.0]" in found


def test_a_finished_run_says_so(run):
    summary = {"method": "BACR", "steps": 3, "generated_tokens": 1234, "wall_seconds": 61.0}
    (run / "summary.json").write_text(json.dumps(summary))
    found = page(run)
    assert "finished, 3 steps" in found and "1,234" in found and "1m01s" in found
