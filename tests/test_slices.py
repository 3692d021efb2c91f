"""Ten slices of the slow tests: each test in one, and none much longer than the others."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import slices

TABLE = json.loads(slices.SECONDS.read_text())
UNITS = [f"tests/test_{i}.py" for i in range(40)]


def test_every_unit_is_in_one_slice_and_no_slice_waits_much_longer():
    seconds = {unit: float(1 + i % 7) for i, unit in enumerate(UNITS)}
    dealt = slices.dealt(UNITS, 10, seconds)
    assert dealt.keys() == set(UNITS)
    loads = [sum(seconds[u] for u in UNITS if dealt[u] == k) for k in range(10)]
    assert max(loads) - min(loads) <= max(seconds.values())


def test_two_workers_begin_with_the_longest_and_have_as_many_tests():
    seconds = {"a": 90.0, "b": 60.0, "c": 20.0, "d": 5.0}
    units = ["d", "c", "a", "a", "b", "c", "c", "c"]
    # The halves are a, d and b, c; one of c's tests goes to the end of the first, which has three.
    assert slices.for_two(units, seconds) == [2, 3, 0, 7, 4, 1, 5, 6]
    assert slices.for_two([], seconds) == []
    assert slices.for_two(["d", "a", "b"], seconds) == [1, 2, 0]


def test_the_order_of_collection_changes_nothing():
    seconds = dict.fromkeys(UNITS[:5], 60.0)
    assert slices.dealt(UNITS, 10, seconds) == slices.dealt(UNITS[::-1] * 2, 10, seconds)


def test_a_file_is_a_unit_unless_the_table_names_its_test():
    seconds = {"tests/a.py::test_x[1]": 60.0, "tests/a.py::test_z": 9.0, "tests/a.py": 5.0}
    of = lambda nodeid: slices.unit_of(nodeid, seconds)
    assert of("tests/a.py::test_x[1]") == "tests/a.py::test_x[1]"
    assert of("tests/a.py::test_x[2]") == of("tests/a.py::test_y") == "tests/a.py"
    assert of("tests/a.py::test_z[1]") == of("tests/a.py::test_z") == "tests/a.py::test_z"


@pytest.mark.parametrize("text", ["10/10", "-1/10", "3", "a/b", "/", "0/0"])
def test_a_slice_that_is_none_is_refused(text):
    with pytest.raises(pytest.UsageError, match="write K/N with K below N"):
        slices.slice_of(text)
    assert slices.slice_of("9/10") == (9, 10)


def test_the_table_names_files_that_are_there():
    root = Path(__file__).parents[1]
    assert [unit for unit in TABLE if not (root / unit.partition("::")[0]).is_file()] == []


def test_a_file_that_is_left_out_here_has_its_slice_all_the_same(tmp_path):
    folder = tmp_path / "tests" / "room"
    folder.mkdir(parents=True)
    mark = "@pytest." + "mark.slow\n"
    for name, text in (("a", mark), ("b", ""), ("c", mark)):
        (folder / f"test_{name}.py").write_text(text)
    files = ["tests/room/test_a.py", "tests/room/test_c.py"]
    assert slices.slow_files(tmp_path / "tests") == files
    # Whoever can't import the first finds the second where the others find it.
    assert slices.dealt([files[1], *files], 2, {}) == slices.dealt(files, 2, {})


def test_ten_slices_hold_every_unit_once_and_their_files_alone_are_read():
    parts = [slices.inside(f"{k}/10")[0] for k in range(10)]
    assert sum(map(len, parts)) == len(set().union(*parts))
    assert set().union(*parts) == {*TABLE, *slices.slow_files(slices.TESTS)}
    read = lambda path, text: (
        not slices.is_elsewhere(
            slices.TESTS / path, SimpleNamespace(option=SimpleNamespace(slice=text))
        )
    )
    # Its tests are several units, in some slices; a file without a slow test is in none.
    of = [k for k in range(10) if any("/test_devices.py" in unit for unit in parts[k])]
    assert [k for k in range(10) if read("test_devices.py", f"{k}/10")] == of != list(range(10))
    assert not any(read("test_mirror.py", f"{k}/10") for k in range(10))
    assert read("test_mirror.py", None) and read("training", "0/10")
