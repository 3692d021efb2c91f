"""Tests that the tables of docs/performance.md agree with the recorded baselines."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

import record

ROOT = Path(__file__).parents[2]


@pytest.fixture
def make():
    where = importlib.util.spec_from_file_location("make", ROOT / "docs/make_performance.py")
    module = importlib.util.module_from_spec(where)
    where.loader.exec_module(module)
    return module


@pytest.fixture
def one_record(tmp_path, make, monkeypatch):
    monkeypatch.setattr(make, "PAGE", tmp_path / "performance.md")
    monkeypatch.setattr(make, "BASELINES", tmp_path)
    machine = {"processor": "A CPU", "family": "6", "model": "1", "cores": 2, "memory_gib": 24}
    content = {
        "benchmark": "forward",
        "date": "2026-01-02",
        "commit": "abcdef0123456789",
        "changed": False,
        "machine": machine | {"accelerators": []},
        "versions": {"python": "3.11", "jax": "0.10"},
        "settings": {},
        "measurements": record.seconds({"ours": [1, 2, 3, 4, 5], "theirs": [6.0] * 5})
        | {"keys": record.measurement([12345], "keys", exact=True)},
        "ratios": {"speed": {"over": "theirs", "under": "ours", "value": 2.0}},
    }
    (tmp_path / "forward.json").write_text(json.dumps(content))
    make.PAGE.write_text(f"before\n\n{make.BEGIN}\nold\n{make.END}\n\nafter\n")


def test_the_page_is_up_to_date(make):
    assert make.PAGE.read_text() == make.page(), "run python docs/make_performance.py"


def test_committed_baselines_contain_no_path_of_a_machine(make):
    for path in make.BASELINES.glob("*.json"):
        content = record.read(path)
        assert content["commit"] and content["changed"] is False
        assert not re.search(r'"/|\b(home|root|tmp)/', path.read_text())


def test_a_table_has_every_measurement_and_ratio_of_a_record(make, one_record):
    text = make.page()
    assert text.startswith("before\n\n") and text.endswith("\n\nafter\n") and "old" not in text
    assert "**A CPU (family 6, model 1), 2 cores, 24 GiB.**\npython 3.11, jax 0.10." in text
    origin = "abcdef01, 2026-01-02"
    assert f"| `benchmarks/forward.py` | ours | 3 s | 2 to 4 | 5 | {origin} |" in text
    assert f"| `benchmarks/forward.py` | keys | 12,345 keys | counted | 1 | {origin} |" in text
    (ratio,) = [line for line in text.splitlines() if "| speed: theirs / ours | 2 x |" in line]
    low, high = ratio.split("|")[4].split(" to ")
    assert float(low) < 2 < float(high)


def test_an_old_page_is_refused_and_written_anew(make, one_record, capsys):
    assert make.main(["--check"]) == 1
    assert "python docs/make_performance.py" in capsys.readouterr().err
    assert make.main([]) == 0
    assert make.main(["--check"]) == 0


def test_a_table_of_a_gpu_has_its_driver(make):
    machine = {"processor": "A CPU", "family": "6", "model": "1", "cores": 2, "memory_gib": 24}
    on_gpu = machine | {"accelerators": ["NVIDIA H200"], "driver": "580.65.06"}
    assert make.machine_of({"machine": on_gpu}).endswith("24 GiB, NVIDIA H200, driver 580.65.06")


def test_a_page_without_markers_is_refused(make, one_record):
    make.PAGE.write_text("no markers")
    with pytest.raises(SystemExit, match="a marker is missing"):
        make.main([])
