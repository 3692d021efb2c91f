"""YAML as keys, values and places; and the one line for what is none."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bacr_jax.config.yaml import entries, nearest_key, parse_file, parse_override
from bacr_jax.errors import UserError
from config_world import write

SECTIONS = {"budget", "eval", "output", "data", "data.ledger"}


def read(path):
    return list(entries(parse_file(path), SECTIONS))


def override(text):
    return list(entries(parse_override(text), SECTIONS))


def test_an_entry_knows_its_key_its_value_and_its_place(tmp_path):
    path = write(tmp_path, "seed: 1\ndata:\n  ledger: {max_operand: [2, x]}\nbudget.max: '8'\n")
    found = [(e.key, e.value, e.text, e.raw, e.where, e.lenient) for e in read(path)]
    assert found == [
        ("seed", 1, "1", "1", f"{path}, line 1", False),
        ("data.ledger.max_operand", [2, "x"], "[2, 'x']", None, f"{path}, line 3", False),
        ("budget.max", "8", "'8'", None, f"{path}, line 4", False),
    ]


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("seed: 1\nfoo:\n  a: 1\n", {"seed": 1, "foo": 2}),
        ("seed: 1\nfoo:\n\n  # a comment\n\n  a:\n    b: 1\n", {"seed": 1, "foo": 2}),
        ("data:\n  min: 1\n  foo:\n    a: 1\n", {"data.min": 2, "data.foo": 3}),
        ("data:\n  ledger:\n    foo:\n      - 1\n", {"data.ledger.foo": 3}),
        ("data: {min: 1,\n  foo: {\n    a: 1}}\n", {"data.min": 1, "data.foo": 2}),
        ("foo: {a: 1}\n", {"foo": 1}),
        ("foo:\n  {a: 1}\n", {"foo": 1}),
        ("foo:\n  - a\n", {"foo": 1}),
        ("foo: |\n  text\n", {"foo": 1}),
        ("foo:\n  text\n", {"foo": 1}),
        ("---\n# top\nfoo: &a\n  a: 1\nbar: *a\n", {"foo": 3, "bar": 5}),
        # What an alias stands for is set where the alias is.
        ("budget: &a\n  min: 1\neval: *a\n", {"budget.min": 2, "eval.min": 3}),
        ("budget.foo:\n  a: 1\n", {"budget.foo": 1}),
    ],
)
def test_the_place_of_an_entry_is_the_line_of_its_key(tmp_path, text, keys):
    path = write(tmp_path, text)
    places = {entry.key: entry.where for entry in read(path)}
    assert places == {key: f"{path}, line {line}" for key, line in keys.items()}


def test_an_override_is_one_entry_that_a_plain_number_makes_text(tmp_path):
    (entry,) = override("output.dir=2024")
    assert (entry.key, entry.value, entry.raw, entry.where) == (
        "output.dir",
        2024,
        "2024",
        "command line",
    )
    assert entry.lenient
    assert [e.value for e in override("budget={min: 1, max: 2}")] == [1, 2]


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "null\n", "---\n", "\ufeff", "budget:\n"])
def test_a_file_that_sets_nothing_has_no_entries(tmp_path, text):
    assert read(write(tmp_path, text)) == []


# Content of a file, and pieces of the line that refuses it.
BAD_FILES = [
    ("seed: 1\nseed: 2", "line 2: seed is already set in line 1; keep only one of them"),
    ("budget: {min: 1}\nbudget.min: 2", "line 2: budget.min is already set in line 1"),
    ("budget: {min: 1}\nbudget: {max: 2}", "line 2: budget is already set in line 1"),
    ("reward:\n  seed: {a: 1, 'a': 2}", "line 2: reward: found 'a' twice; keep only one of them"),
    ("seed: [{a: {b: 1, b: 1}}]", "line 1: seed: found 'b' twice; keep only one of them"),
    ("foo:\n  a: 1\n  b: 2\n\n  a: 3", "line 5: foo: found 'a' twice; keep only one of them"),
    ("foo:\n- a: 1\n- {b: 2,\n   b: 3}", "line 4: foo: found 'b' twice; keep only one of them"),
    ("budget:\n  min: 1\nseed: 1\nbudget:\n  max: 2", "line 4: budget is already set in line 1"),
    ("budget:\n  min: 1\n  max: 2\n  min: 3", "line 4: budget.min is already set in line 2"),
    ("- seed", "line 1: found ['seed'] instead of keys; use lines such as `seed: 0`"),
    ("seed = 1", "line 1: found 'seed = 1' instead of keys"),
    ("42", "found 42 instead of keys"),
    ("seed: [", "not valid"),
    ("seed: 1\n\tmethod: bacr", "line 2: the YAML is not valid"),
    ("seed: 1\n--- \nseed: 2", "not valid"),
    ("seed: *nowhere", "line 1: the YAML is not valid (found undefined alias 'nowhere')"),
    ("seed: !!python/object:os.system {}", "seed: the value is not valid YAML"),
    ("seed: !!int x", "line 1: seed: the value is not valid YAML"),
    ("seed: " + "9" * 5000, "seed: the value is not valid YAML"),
    ("output: {dir: 2026-13-45}", "output.dir: the value is not valid YAML"),
    ("eval: {budgets: &a [*a]}", "eval.budgets: the value is not valid YAML"),
    ("budget: &a {budget: *a}", "budget.budget: the value is not valid YAML"),
    ("? [a]\n: 1", "found a list or mapping as a key; use the name of a config key"),
    ("'': 1", "line 1: found an empty key; use the name of a config key"),
    ("[" * 600, "the YAML is not valid (nested too deeply)"),
    ('seed: "\\U99999999"', "not valid"),
    (b"\xff\xfe", "line 1: byte 0xff is not UTF-8; save the file as UTF-8 text"),
    (b"seed: 1\nmethod: \xe9", "line 2: byte 0xe9 is not UTF-8"),
    ("seed: \x01", "line 1: the YAML is not valid (special characters are not allowed)"),
    ("#" * 1_000_001, "is larger than 1,000,000 bytes; use a YAML config"),
]

BAD_OVERRIDES = [
    (
        "seed",
        "command line: 'seed' is not an override of a config key; use key=value, such as seed=1",
    ),
    ("=1", "command line: '=1' is not an override of a config key; use key=value"),
    ("", "command line: '' is not an override of a config key; use key=value"),
    ("budget={max: 3, max: 4}", "command line: budget.max is already set"),
    ("seed=[", "command line: seed: the YAML is not valid (expected the node content"),
    ("seed=1\nmethod: 2", "command line: seed: the YAML is not valid"),
]


@pytest.mark.parametrize(("text", "fragment"), BAD_FILES, ids=[t[:30] for t, _ in BAD_FILES])
def test_a_bad_file_is_refused_in_one_line_that_names_it(tmp_path, text, fragment):
    path = write(tmp_path, text)
    with pytest.raises(UserError) as excinfo:
        read(path)
    line = str(excinfo.value)
    assert line.isprintable() and line.startswith(str(path)) and fragment in line
    assert len(line) < len(str(path)) + 400


@pytest.mark.parametrize(("text", "fragment"), BAD_OVERRIDES)
def test_a_bad_override_is_refused_in_one_line(text, fragment):
    with pytest.raises(UserError) as excinfo:
        override(text)
    line = str(excinfo.value)
    assert line.isprintable() and line.startswith("command line: ") and fragment in line


def test_files_that_can_not_be_read_are_refused(tmp_path):
    write(tmp_path, "", "quickstart.yaml")
    cases = {
        tmp_path / "quikstart.yaml": f"no such file; use {tmp_path / 'quickstart.yaml'}",
        tmp_path / "no" / "such": "no such file; use the path of a YAML file",
        tmp_path: "can't be read (Is a directory)",
        tmp_path / "quickstart.yaml" / "x": "can't be read (Not a directory)",
        tmp_path / "a\0b": "can't be read (embedded null",
        tmp_path / ("x" * 1000): "can't be read (File name too long)",
    }
    for path, fragment in cases.items():
        with pytest.raises(UserError) as excinfo:
            parse_file(path)
        assert str(excinfo.value).isprintable() and fragment in str(excinfo.value)


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("budget.mix", "budget.min"),
        ("budgt", "budget"),
        # The same last name elsewhere.
        ("rate", "warmup.rate or value.rate"),
        ("zzz", "one of seed, budget, warmup, value"),
        ("seed.qqqqqqqqq", "a key that bacr keys lists"),
        ("no.such.thing", "a key that bacr keys lists"),
        # Neither the section nor the key as it is called.
        ("valeu.raet", "value.rate"),
    ],
)
def test_an_unknown_key_gets_the_nearest_one(key, advice):
    known = dict.fromkeys(["seed", "budget.min", "warmup.rate", "value.rate"], False)
    known |= dict.fromkeys(["budget", "warmup", "value"], True) | {"value.hidden_size": False}
    assert nearest_key(key, known) == advice


YAML_LIKE = st.text("seedbgtmaxin01.:-_{}[]&*!|>'\"\\#%@?, \n\t~<=", max_size=60)


@given(st.one_of(st.binary(max_size=200), YAML_LIKE.map(str.encode)))
@example(b"!!timestamp x")
@example(b"seed: !!bool x")
@example(b"seed: !!float ''")
@example(b"seed: !!binary x")
@example(b"budget: !!set {a, b}")
@example(b"%YAML 99999999999999999999.1\n---\nseed: 1")
@example(b"%TAG ! tag:%ff\n---\nseed: !a 1")
@example(b"<<: {seed: 1}")
@example(b"=: 1")
@example(b"eval: {budgets: !!omap [a: 1]}")
@settings(max_examples=300)
def test_any_bytes_are_entries_or_one_line(tmp_path_factory, content):
    entries_or_one_line(lambda: read(write(tmp_path_factory.getbasetemp(), content)))


@given(st.text(max_size=40), YAML_LIKE)
@settings(max_examples=150)
def test_any_override_is_entries_or_one_line(text, value):
    for line in (text, f"eval.budgets={value}", f"{value}=1"):
        entries_or_one_line(lambda line=line: override(line))


def entries_or_one_line(call):
    try:
        call()
    except UserError as error:
        assert str(error) and str(error).isprintable()
