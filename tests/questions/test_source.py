"""One way in for all questions: rows, mixtures by weight, files of one's own."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from bacr_jax.config import Config, DataConfig
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.prompts.graders import open_graders
from bacr_jax.questions.groups import NO_GROUP
from bacr_jax.questions.loaders import load_questions, open_source
from bacr_jax.questions.source import BEYOND, NO_GOLD, Row, Source, check_labeled, question_set

DATA = DataConfig(num_groups=1)
GRADER = resolve(Config()).task.grader
OWN = """
STYLES = ("at_once", "steps")

def questions(split):
    first = 0 if split == "train" else 100
    for n in range(first, first + 10):
        yield {"question": f"double {n}", "answer": str(2 * n), "metadata": {"n": n}, "level": 2}

def render(row):
    return f"2 x {row.metadata['n']} ="

def score(answer, row):
    if answer == "hang":
        while True:
            pass
    return 1.0 if answer == row.answer else 0.5 * (int(answer) % 2 == 0)

def trace(row, style):
    n = row.metadata["n"]
    return str(2 * n) if style == "at_once" else f"{n} + {n} = {2 * n}"
"""

ROW = """
def questions(split):
    return [{"question": "q", "answer": "1", %s}] * 2

"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "doubles.py"
    path.write_text(OWN)
    return str(path)


def test_a_file_of_ones_own_is_a_set(own):
    train, test = (load_questions(own, DATA, 0, split) for split in ("train", "test"))
    assert train.questions[3] == "2 x 3 =" and train.answers[3] == "6"
    assert train.ids[3] == "doubles-train-3" and set(train.levels) == {2}
    assert set(train.questions).isdisjoint(test.questions)
    source, row = test.rows[0]
    assert source.trace(row, "steps") == "100 + 100 = 200" and source.styles == ("at_once", "steps")


def test_its_score_is_asked_in_workers_that_can_be_killed(own):
    questions = load_questions(own, DATA, 0, "train").take([1, 2, 3, 4])
    grader = open_graders(GRADER, [questions])[questions.graded_by]
    grader._pool._deadline = 1.0
    with grader:
        texts = [f"<answer>{text}</answer>" for text in ("2", "8", "hang", "x")]
        found = grader.grade(texts, questions.answers, questions=questions.questions)
        counts = grader.counters()
    assert [verdict.correct for verdict in found] == [1.0, 0.5, 0.0, 0.0]
    assert (counts["failed_late"], counts["failed_raised"]) == (1, 1)
    assert counts["score_percent"] == 150


@pytest.mark.parametrize(
    ("source", "fragment"),
    [
        ("x = 1", "does not define the function questions(split)"),
        (
            "def questions(split):\n    raise KeyError('n')",
            "raised KeyError: 'n' (doubles.py, line 2)",
        ),
        ("def questions(split):\n    return [{'answer': '1'}]", "row 0 of 'doubles' is"),
        (
            "def questions(split):\n    return [{'question': 1}]",
            "a mapping with the string `question`",
        ),
        (
            "def questions(split):\n    return []",
            "doubles: none of the questions in this set can be used",
        ),
        (
            OWN.replace("STYLES =", "OTHER ="),
            "STYLES of '{path}' is (); it must be a list with the names of the trace styles",
        ),
        ("def questions(", "can't be imported"),
        (
            "def questions(split):\n    yield {'question': 'q'}\n    raise KeyError('n')",
            "questions of 'doubles' raised KeyError: 'n' (doubles.py, line 3); fix the file",
        ),
        (
            "def questions(split):\n    import nomodule",
            "raised ModuleNotFoundError: No module named 'nomodule' (doubles.py, line 2)",
        ),
        (
            "import json\ndef questions(split):\n    return json.loads('{')",
            "double quotes: line 1 column 2 (char 1) (doubles.py, line 3); fix",
        ),
        (
            "def questions(split):\n    pass",
            "questions of 'doubles' returned None instead of a list; return a list",
        ),
        (ROW % "'level': 'hard'", "row 0 of 'doubles' is"),
        (ROW % "'level': 77", "`level` (1 to 5)"),
        (ROW % "'level': 2.9", "`level` (1 to 5)"),
        (ROW % "'metadata': [1]", "`metadata` (a mapping)"),
        (ROW % "'id': 'same'", "row 1 of 'doubles' is"),
        (
            ROW % "" + "def render(row):\n    return 5",
            "render of 'doubles' returned 5 instead of a string; return a string",
        ),
        (
            OWN.replace('("at_once", "steps")', '"abc"'),
            "' is 'abc'; it must be a list with the names of the trace styles",
        ),
    ],
)
def test_a_file_that_is_none_is_refused_in_one_line(tmp_path, source, fragment):
    path = tmp_path / "doubles.py"
    path.write_text(source)
    with pytest.raises(UserError) as error:
        load_questions(str(path), DATA, 0, "train")
    assert (
        fragment.replace("{path}", str(path)) in str(error.value) and str(error.value).isprintable()
    )


def test_metadata_that_no_worker_could_read_is_refused(tmp_path):
    path = tmp_path / "doubles.py"
    path.write_text(OWN.replace('{"n": n}', '{"n": n, "f": lambda: 0}'))
    questions = load_questions(str(path), DATA, 0, "train")
    with pytest.raises(UserError, match="data: row 'doubles-train-0': .*; use only plain values"):
        open_graders(GRADER, [questions])


def test_rows_that_a_score_could_not_tell_apart_are_refused(tmp_path):
    path, nan = tmp_path / "mine.py", "float('nan')"

    def opened(*metadata):
        rows = [f"{{'question': 'Which?', 'metadata': {{'n': {one}}}}}" for one in metadata]
        made = (
            f"def questions(split): return [{', '.join(rows)}]\ndef score(answer, row): return 1.0"
        )
        path.write_text(made)
        questions = load_questions(str(path), DATA, 0, "train")
        open_graders(GRADER, [questions])[questions.graded_by].close()

    for same in (("1", "1"), (nan, nan), ("{'a': 1, 'b': 2}", "{'b': 2, 'a': 1}")):
        opened(*same)
    line = (
        "data: 'mine-train-1' of mine has the same question and answer as 'mine-train-0', but "
        "different metadata"
    )
    for differ in (("1", "2"), ("[1]", "None"), ("1", "2", "1")):
        with pytest.raises(UserError, match=re.escape(line)):
            opened(*differ)


def test_rows_of_two_splits_that_a_score_could_not_tell_apart_are_refused(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def questions(split): return [{'question': 'Which?', 'metadata': {'of': split}}]\n"
        "def score(answer, row): return float(answer == row.metadata['of'])\n"
    )
    both = [load_questions(str(path), DATA, 0, split) for split in ("train", "test")]
    with pytest.raises(
        UserError, match="'mine-test-0' of mine has the same question and answer as 'mine-train-0'"
    ):
        open_graders(GRADER, both)


def test_the_file_on_its_page_works(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    section = page.split("## A source of your own\n")[1]
    path = tmp_path / "mine.py"
    path.write_text(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1])
    questions = load_questions(str(path), DATA, 0, "test").take([0])
    assert questions.questions == ["What is 400 squared? Write digits only."]
    source, row = questions.rows[0]
    assert source.trace(row, "steps") == "400 x 400 = 160000"
    with open_graders(GRADER, [questions])[questions.graded_by] as grader:
        texts, asked = ["<answer>160,000</answer>"], questions.questions
        assert grader.grade(texts, questions.answers, questions=asked)[0].correct == 1.0


def rows(name, count, answer="1"):
    return Source(
        name, lambda split: [Row(f"{name}{i}", f"{name} {i}?", answer) for i in range(count)]
    )


def test_a_mixture_holds_of_each_set_what_its_weight_allows():
    mixed = question_set([(2.0, rows("a", 10)), (1.0, rows("b", 40))], DATA, "train")
    assert mixed.subjects.count("a") == 10 and mixed.subjects.count("b") == 5
    assert len(set(mixed.ids)) == 15 and mixed.name == "a + b"
    # Evenly spaced, and the others are accounted for.
    assert [text for text in mixed.questions if text[0] == "b"] == [f"b {8 * i}?" for i in range(5)]
    assert [row.reason for row in mixed.left_out] == [BEYOND] * 35


def test_rows_whose_reference_can_not_be_graded_are_left_out(tmp_path):
    path = tmp_path / "mine.py"
    answers = ["1", "  ", "\\frac{3}{1", "\\boxed{}", "", "x" * 2001, "\x00", None]
    rows = [{"question": f"q{n}", "answer": answer} for n, answer in enumerate(answers)]
    path.write_text(f"def questions(split):\n    return {rows!r}\n")
    questions = load_questions(str(path), DATA, 0, "train")
    assert questions.answers == ["1"]
    assert [row.id for row in questions.left_out] == [f"mine-train-{n}" for n in range(1, 8)]
    assert {row.reason for row in questions.left_out} == {NO_GOLD}
    # A verifier can read any text.
    verbatim = dataclasses.replace(DATA, answers="verbatim")
    assert len(load_questions(str(path), verbatim, 0, "train")) == 5
    # A file's score needs no reference.
    path.write_text(path.read_text() + "\ndef score(answer, row):\n    return 1.0\n")
    assert len(load_questions(str(path), DATA, 0, "train")) == 8


def test_a_list_mixes_sets_with_weights(tmp_path):
    for name in "ab":
        lines = [json.dumps({"question": f"{name}{i}", "answer": "1"}) for i in range(6)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    spec = [f"jsonl:{tmp_path}/a.jsonl", f"0.5*jsonl:{tmp_path}/b.jsonl"]
    mixed = load_questions(spec, DATA, 0, "train")
    assert sorted(q[0] for q in mixed.questions) == ["a"] * 6 + ["b"] * 3


def labels_file(folder, ids):
    path = folder / "labels.jsonl"
    lines = [json.dumps({"id": name, "avg": rate, "samples": 8}) for name, rate in ids.items()]
    path.write_text("\n".join(lines))
    return dataclasses.replace(DATA, groups="solve_rate", labels=str(path), num_groups=4)


def test_a_mixture_takes_the_labels_of_its_sets(tmp_path):
    config = labels_file(tmp_path, {"a0": 1.0, "a1": 0.0, "b0": 0.5})
    mixed = question_set([(2.0, rows("a", 2)), (1.0, rows("b", 1))], config, "train")
    assert mixed.ids == ["0-a0", "0-a1", "1-b0"]
    assert mixed.groups.tolist() == [0, 3, 2]


def test_an_id_that_several_sets_of_a_mixture_have_is_labeled_with_the_index_of_its_set(tmp_path):
    parts = [(1.0, rows("a", 2)), (1.0, rows("a", 2))]
    config = labels_file(tmp_path, {"a0": 1.0, "0-a1": 1.0, "1-a1": 0.0})
    config = dataclasses.replace(config, train=("jsonl:a.jsonl", "jsonl:b.jsonl"))
    mixed = question_set(parts, config, "train")
    assert mixed.groups.tolist() == [NO_GROUP, 0, NO_GROUP, 3]
    with pytest.raises(
        UserError, match="2 of 4 .*'0-a0', but a label for 'a0', which is an id in several sets;"
    ):
        check_labeled(mixed, config)
    check_labeled(mixed.take([1, 3]), config)


@pytest.mark.parametrize(
    ("ids", "labeled", "of_another_split"),
    [
        (["a", "b"], ["b"], ""),
        (["gsm8k-train-0", "b"], ["b", "gsm8k-train-1"], ""),
        (["gsm8k-train-0", "gsm8k-train-1"], ["gsm8k-test-0", "b"], "gsm8k-test-0"),
        (["train/algebra/7.json"], ["test/algebra/7.json"], "test/algebra/7.json"),
    ],
)
@pytest.mark.parametrize("is_mixture", [False, True])
def test_the_line_about_missing_labels_names_those_of_another_split(
    tmp_path, ids, labeled, of_another_split, is_mixture
):
    parts = [(1.0, Source("own", lambda split: [Row(name, f"{name}?", "1") for name in ids]))]
    config = labels_file(tmp_path, dict.fromkeys([*labeled, "c0", "c1"], 0.5))
    first = ids[0]
    if is_mixture:
        parts.append((1.0, rows("c", len(ids))))
        config = dataclasses.replace(config, train=("jsonl:own.jsonl", "jsonl:c.jsonl"))
        first = f"0-{first}"
    questions = question_set(parts, config, "train")
    missing = len(set(ids) - set(labeled))
    hint = f", but a label for {of_another_split!r} of another split" if of_another_split else ""
    with pytest.raises(UserError) as error:
        check_labeled(questions, config)
    assert str(error.value) == (
        f"data.labels={config.labels} has no label for {missing} of {len(questions)} questions, "
        f"the first of which is {first!r}{hint}; create the labels again with bacr evaluate "
        "--split train --label-difficulty on this set"
    )


def test_sets_that_are_scored_in_different_ways_are_not_mixed(own):
    with pytest.raises(UserError, match="doubles and a can't be mixed, because"):
        question_set([(1.0, open_source(own, DATA, 0)), (1.0, rows("a", 3))], DATA, "train")


def test_the_ledger_stands_behind_the_same_protocol():
    found = load_questions("ledger", DATA, 0, "test").take([0])
    (source, row), answer = found.rows[0], found.answers[0]
    assert source.render(row) == row.question == found.questions[0]
    assert all(source.trace(row, style).endswith(f"={answer}") for style in source.styles)
