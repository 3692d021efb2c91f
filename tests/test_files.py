"""Files of others: limits hold, and whatever is in them is a value or one of two exceptions."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bacr_io.files import (
    MAX_DEPTH,
    MAX_DIGITS,
    NotJson,
    check_regular,
    parse_json,
    read_file,
    read_object,
)
from bacr_jax.config.io import load, override
from bacr_jax.config.schema import Config
from bacr_jax.errors import UserError, printable
from bacr_jax.files import keep_until, lines_until, read_lines, write_atomically
from files_world import full_disk

QUICK = settings(max_examples=150)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside),
    max_leaves=20,
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested more than 64 levels deep"),
        ("[" * 100_000, "nested more than"),
        ('{"a":' * 100_000, "nested more than"),
        ("9" * (MAX_DIGITS + 1), "a number of 301 digits"),
        ("1e999", "the number 1e999, which is too large"),
        ("-1e999", "too large"),
        ("NaN", "contains NaN"),
        ('"\\ud800"', "half of a surrogate pair"),
        ('{"\\udfff": 1}', "half of a surrogate pair"),
        (b"\xff", "not UTF-8 at byte 0"),
        ("", "Expecting value"),
        ("[1, 2", "Expecting"),
        ("\0", "Expecting value"),
    ],
)
def test_what_readers_would_stumble_over_is_refused(text, says):
    with pytest.raises(NotJson, match=says):
        parse_json(text)


def test_what_looks_like_it_is_read():
    assert parse_json('"' + "[" * 1000 + '"') == "[" * 1000
    assert parse_json('["\\"[[", "\\ud83d\\ude00"]') == ['"[[', "\U0001f600"]
    assert parse_json(b"\xef\xbb\xbf[1]") == [1]
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert parse_json("[[]," * 1 + "[]]") == [[], []]
    assert parse_json("[" + ",".join(["[]"] * 500) + "]") == [[]] * 500
    assert parse_json("9" * MAX_DIGITS) == int("9" * MAX_DIGITS)


def test_tables_keep_their_odd_fields():
    row = parse_json('{"a": NaN, "b": "\\ud800"}', table=True)
    assert row["a"] != row["a"] and row["b"] == "\ud800"


@QUICK
@given(st.text() | st.binary() | st.text(alphabet='[]{}",:\\u0d8e1-.'))
def test_any_text_is_json_or_refused(text):
    try:
        value = parse_json(text)
    except NotJson as error:
        assert str(error)
    else:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


@QUICK
@given(JSON)
def test_json_of_any_value_comes_back_or_is_refused(value):
    text = json.dumps(value)
    try:
        assert parse_json(text) == value
    except NotJson:
        assert "NaN" in text or "Infinity" in text or "\\ud" in text or len(text) > MAX_DIGITS


@pytest.mark.parametrize("step", ['"3"', "null", "2.5", "true", "[1]"])
@pytest.mark.parametrize("last", [True, False])
def test_a_step_that_is_no_whole_number_is_one_line(tmp_path, step, last):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{{"step": {step}}}\n' + ("" if last else '{"step": 3}\n'))
    until_one = lambda path: list(lines_until(path, 1))
    for use in (read_lines, until_one, lambda path: keep_until(path, 1)):
        with pytest.raises(
            UserError, match=r"metrics\.jsonl, line 2: .*correct or delete"
        ) as caught:
            use(path)
        assert "\n" not in str(caught.value)


def test_pipes_devices_and_folders_are_refused_unopened(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="regular|directory"):
            read_file(path)
    with pytest.raises(OSError, match="regular"):
        check_regular(pipe)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none")
    with pytest.raises(ValueError, match="null"):
        read_file(Path("a\0b"))


@pytest.mark.parametrize("content", ["new", b"new", iter(["n", "ew"])], ids=["text", "bytes", "it"])
def test_a_file_that_can_not_be_written_stays_as_it_is(tmp_path, monkeypatch, content):
    path = tmp_path / "file"
    path.write_text("old")
    full_disk(monkeypatch)
    with pytest.raises(
        UserError, match=r"file: the file can't be written \(No space left on device\)"
    ):
        write_atomically(path, content)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    write_atomically(path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_two_that_write_the_same_file_leave_one_of_the_two_whole(tmp_path):
    path = tmp_path / "file"

    def pieces():
        yield "one, "
        write_atomically(path, "another")
        assert path.read_text() == "another"
        yield "whole"

    write_atomically(path, pieces())
    assert path.read_text() == "one, whole" and list(tmp_path.iterdir()) == [path]


def test_larger_files_are_refused(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("[1, 2, 3]")
    assert read_file(path, most=9) == b"[1, 2, 3]"
    with pytest.raises(OSError, match="larger than 8 bytes"):
        read_file(path, most=8)
    with pytest.raises(NotJson, match="the JSON value is a list instead of an object"):
        read_object(path)


@QUICK
@given(st.text() | st.text(alphabet="[]{}:,-#&*!|>'\"%@` \n\t0123456789.eE+xo_ab"))
def test_any_yaml_value_is_a_setting_or_refused(text):
    try:
        override(Config(), [f"seed={text}", f"budget.levels={text}", f"output.dir={text}"])
    except UserError as error:
        assert str(error).isprintable()


@settings(max_examples=60)
@given(st.binary(max_size=200) | st.text(alphabet="seed: budget.max{}[]&*!\n\t 01\\u", max_size=80))
def test_any_yaml_file_is_a_config_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("yaml") / "c.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    try:
        assert isinstance(load([path]), Config)
    except UserError as error:
        assert str(error).isprintable()


@pytest.mark.parametrize("text", ["0100", "1:30", "1_000", "-0x1F_", "1__0", "190:20:30", "0b11"])
def test_numbers_are_those_of_yaml_1_2(text):
    with pytest.raises(UserError, match="seed: found"):
        override(Config(), [f"seed={text}"])
    assert override(Config(), [f"output.dir={text}"]).output.dir == text


def test_yaml_1_2_writes_numbers_so():
    seeds = {"0": 0, "17": 17, "+3": 3, "0x1F": 31, "0o17": 15}
    assert {text: override(Config(), [f"seed={text}"]).seed for text in seeds} == seeds
    rates = {"1e-6": 1e-6, "1.5": 1.5, ".5": 0.5, "5.": 5.0, "1.5e+3": 1500.0}
    key = "optimizer.learning_rate"
    read = {t: override(Config(), [f"{key}={t}"]).optimizer.learning_rate for t in rates}
    assert read == rates


@QUICK
@given(st.text())
def test_text_that_is_shown_has_one_printable_line(text):
    assert printable(text).isprintable()
