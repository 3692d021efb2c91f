"""Two records of a benchmark are compared measurement by measurement."""

import copy
import json
import sys

import pytest

import compare
import record

OLD = [1.0, 1.02, 0.98, 1.01, 0.99, 1.0, 1.0]


@pytest.fixture
def base():
    return {
        "benchmark": "forward",
        "date": "2026-01-01",
        "commit": "abc",
        "changed": False,
        "machine": record.machine(),
        "versions": {},
        "settings": {"rows": 4},
        "measurements": {
            "seconds": record.measurement(OLD),
            "rate": record.measurement([100 * x for x in OLD], "tokens/s", "higher"),
            "count": record.measurement([10], "keys", exact=True),
        },
        "ratios": {},
    }


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    def compare_files(old, new, *words):
        for name, content in (("old", old), ("new", new)):
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        files = [str(tmp_path / "old.json"), str(tmp_path / "new.json")]
        monkeypatch.setattr(sys, "argv", ["compare.py", *files, *words])
        code = compare.main()
        return code, capsys.readouterr()

    return compare_files


def changed(base, name, factor):
    new = copy.deepcopy(base)
    before = new["measurements"][name]
    values = [factor * value for value in before["values"]]
    options = (before["unit"], before["better"], before["exact"])
    new["measurements"][name] = record.measurement(values, *options)
    return new


def test_a_record_is_not_worse_than_itself(run, base):
    code, printed = run(base, base)
    assert code == 0
    assert printed.out.count("no difference shown") == 2 and printed.out.count(" same") == 1


@pytest.mark.parametrize(
    "name, factor, verdict, ratio",
    [
        ("seconds", 2.0, "worse", "0.500"),
        ("seconds", 0.5, "better", "2.000"),
        ("rate", 2.0, "better", "2.000"),
        ("rate", 0.5, "worse", "0.500"),
        ("count", 1.25, "worse", "0.800"),
        ("count", 0.5, "better", "2.000"),
        ("seconds", 1.005, "no difference shown", "0.995"),
    ],
)
def test_the_verdict_follows_the_speed(run, base, name, factor, verdict, ratio):
    code, printed = run(base, changed(base, name, factor))
    (line,) = [row for row in printed.out.splitlines() if row.startswith(f"{name} ")]
    assert line.endswith(verdict) and ratio in line
    assert code == (verdict == "worse")


def test_a_change_within_the_tolerance_is_no_difference(run, base):
    assert run(base, changed(base, "seconds", 1.3))[0] == 1
    assert run(base, changed(base, "seconds", 1.3), "--tolerance", "0.5")[0] == 0


def test_few_values_give_a_ratio_without_a_verdict(run, base):
    new = copy.deepcopy(base)
    new["measurements"]["seconds"] = record.measurement([9.0] * 4)
    code, printed = run(base, new)
    assert code == 0 and "fewer than 5 values" in printed.out


@pytest.mark.parametrize("field", ["benchmark", "settings", "measurements", "machine"])
def test_records_of_different_things_are_refused_in_one_line(run, base, field):
    new = copy.deepcopy(base)
    if field == "machine":
        new["machine"]["processor"] = "another"
    else:
        new[field] = {}
    code, printed = run(base, new)
    assert code == 2 and printed.out == ""
    assert printed.err.startswith(f"{field}:") and printed.err.count("\n") == 1


def test_another_machine_can_be_allowed(run, base):
    new = copy.deepcopy(base)
    new["machine"]["processor"] = "another"
    assert run(base, new, "--other-machine")[0] == 0
