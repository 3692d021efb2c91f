"""Every published form of the sets gives the same questions and answers."""

import dataclasses
import datetime
import decimal
import json

import numpy as np
import pytest

from bacr_grading import Grader
from bacr_jax.config import DataConfig
from bacr_jax.errors import UserError
from bacr_jax.questions.groups import NO_GROUP
from bacr_jax.questions.loaders import load_questions
from bacr_jax.questions.source import NO_GOLD, NO_QUESTION


def load(tmp_path, name, rows, split="train", **settings):
    (tmp_path / "set.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    config = DataConfig(dir=str(tmp_path), **settings)
    return load_questions(f"{name}:set.jsonl", config, 0, split)


class TestForms:
    @pytest.mark.parametrize(
        "row",
        [
            {"id": 61, "problem": "Q", "solution": "so \\boxed{25}", "answer": "025", "url": "u"},
            {"ID": "2024-I-1", "Problem": "Q", "Solution": "so 25", "Answer": 25},
            {"id": 0, "problem": "Q", "solution": "\\boxed{025}", "url": "u"},
        ],
        ids=["HuggingFaceH4", "Maxwell-Jia", "math-ai"],
    )
    def test_aime_in_three_forms_is_25(self, tmp_path, row):
        found = load(tmp_path, "aime24", [row], "test")
        assert found.questions == ["Q"]
        with Grader(workers=1) as grader:
            verdicts = grader.grade(
                ["\\boxed{25}", "\\boxed{025}", "\\boxed{26}"], found.answers * 3
            )
        assert [verdict.correct for verdict in verdicts] == [True, True, False]

    @pytest.mark.parametrize(
        ("answer", "gold"),
        [("It is 2.\n#### 1,000", "1,000"), ("#### -3\n", "-3"), ("72", "72")],
    )
    def test_gsm8k(self, tmp_path, answer, gold):
        rows = [{"question": " Q ", "answer": answer}]
        found = load(tmp_path, "gsm8k", rows)
        assert (found.questions, found.answers, found.ids) == (["Q"], [gold], ["gsm8k-train-0"])

    def test_deepscaler(self, tmp_path):
        rows = [
            {"problem": "Q0", "answer": "-\\frac{2}{3}", "solution": "Adding gives 7."},
            {"problem": "Q1", "answer": "26", "solution": ""},
            {"problem": "Q2", "answer": "(x-1)^2", "solution": "So it is $\\boxed{(x-1)^2}$."},
        ]
        found = load(tmp_path, "jsonl", rows, num_groups=1)
        assert found.questions == ["Q0", "Q1", "Q2"] and not found.left_out
        assert found.answers == ["-\\frac{2}{3}", "26", "(x-1)^2"]

    def test_math_levels_subjects_and_the_last_box(self, tmp_path):
        # boxes further apart than 40 characters are no list
        solution = f"one step gives \\boxed{{1}}{' and so on' * 5}, \\boxed{{\\frac{{1}}{{2}}}}"
        rows = [
            {"problem": f"Q{i}", "level": level, "type": "Algebra", "solution": solution}
            for i, level in enumerate(["Level 1", "Level 5", "Level ?", 3, "4"])
        ]
        found = load(tmp_path, "math", rows)
        assert set(found.answers) == {"\\frac{1}{2}"}
        assert found.levels.tolist() == [1, 5, 0, 3, 4]
        assert found.groups.tolist() == [0, 3, 3, 1, 2]
        assert found.subjects == ["Algebra"] * 5

    def test_levels_may_be_floats_and_others_are_shown(self, tmp_path):
        rows = [{"question": "Q", "answer": "1", "level": level} for level in (3.0, "Level 2.0", 6)]
        assert load(tmp_path, "jsonl", rows).levels.tolist() == [3, 2, 0]
        with pytest.raises(
            UserError,
            match="has the difficulty level 'six'; use levels from 1 to 5, or set "
            "data.num_groups=1",
        ):
            load(tmp_path, "jsonl", [rows[0] | {"level": "six"}])

    def test_math500_takes_its_answer_column(self, tmp_path):
        row = {
            "problem": "Q",
            "solution": "\\boxed{1}",
            "answer": "2",
            "subject": "Geometry",
            "level": 2,
            "unique_id": "test/geometry/1.json",
        }
        found = load(tmp_path, "math500", [row], "test")
        assert (found.answers, found.levels.tolist()) == (["2"], [2])
        assert (found.subjects, found.ids) == (["Geometry"], ["test/geometry/1.json"])

    @pytest.mark.parametrize(
        ("gold", "right", "wrong"),
        [
            # a relative error of 1 % is right, on both sides of it 0.9 % and 1.2 %
            ("4.5e33", ["4.54 \\times 10^{33}", "4.5e33 \\text{ erg/s}"], ["4.555e33", "4.5e32"]),
            ("9.8 \\mathrm{~m} / \\mathrm{s}^2", ["9.8", "9.81"], ["9.95", "98"]),
            ("-0.002", ["-2.0e-3"], ["0.002", "-0.0021"]),
        ],
    )
    def test_minerva_golds_with_units_and_powers_of_ten(self, tmp_path, gold, right, wrong):
        rows = [
            {"problem": "Q", "solution": f"so \\boxed{{{gold}}}.", "type": "Astronomy", "idx": 0}
        ]
        found = load(tmp_path, "minerva_math", rows, "test")
        assert found.subjects == ["Astronomy"]
        assert found.relative_tolerance == 0.01
        texts = [f"\\boxed{{{text}}}" for text in right + wrong]
        with Grader(workers=1, relative_tolerance=found.relative_tolerance) as grader:
            verdicts = grader.grade(texts, found.answers * len(texts))
        assert [v.correct for v in verdicts] == [True] * len(right) + [False] * len(wrong)

    @pytest.mark.parametrize(("name", "size"), [("aime24", "30"), ("minerva_math", "272")])
    def test_sets_that_differ_from_the_papers_say_so(self, tmp_path, name, size):
        found = load(tmp_path, name, [{"problem": "Q", "solution": "\\boxed{1}"}], "test")
        assert size in found.note and "no public set" in " ".join(found.summary())


class TestOwnTables:
    def test_named_columns(self, tmp_path):
        rows = [{"frage": "Q", "antwort": 7, "level": 2, "answer": "8"}]
        columns = {"question_column": "frage", "answer_column": "antwort"}
        found = load(tmp_path, "jsonl", rows, **columns)
        assert (found.questions, found.answers) == (["Q"], ["7"])
        assert found.groups.tolist() == [0]

    # Answers, and worked solutions without a box, in the column `solution`.
    SHORT = ("34", 34, "-1/2", "7 apples", "$\\frac{1}{2}$", "x^2 + 1", "(1, 2)", "Paris")
    WORKED = ("no box, 7", "So the sum is 7.", "We find $x=3$.", "1 + 1 = 2\n2 + 2 = 4")

    @pytest.mark.parametrize(
        ("settings", "count"),
        [({}, len(SHORT)), ({"answer_column": "solution"}, len(SHORT + WORKED))],
    )
    def test_plain_answers_in_the_column_of_solutions(self, tmp_path, settings, count):
        texts = (*self.SHORT, *self.WORKED)
        rows = [{"id": str(i), "prompt": "Q", "solution": text} for i, text in enumerate(texts)]
        found = load(tmp_path, "jsonl", rows, num_groups=1, **settings)
        assert found.ids == [str(i) for i in range(count)]
        assert found.answers[:2] == ["34", "34"]
        # A published set has worked solutions, whose answers are marked.
        marked = {"id": "x", "prompt": "Q", "solution": "\\boxed{1}"}
        assert load(tmp_path, "math", [*rows, marked], **settings).ids == ["x"]

    def test_columns_of_the_user_do_not_touch_the_known_sets(self, tmp_path):
        rows = [{"question": "Q", "answer": "#### 7"}]
        found = load(tmp_path, "gsm8k", rows, question_column="frage", answer_column="antwort")
        assert found.answers == ["7"]

    @pytest.mark.parametrize(
        ("name", "rows", "says"),
        [
            (
                "jsonl",
                [{"frage": "Q", "answer": "1"}],
                r"no column .* with the question; .*frage, answer.*"
                r"data\.question_column",
            ),
            (
                "jsonl",
                [{"question": "Q", "antwort": "1"}],
                r"no column .* with the answer; .*question, antwort.*"
                r"data\.answer_column",
            ),
            (
                "gsm8k",
                [{"question": "Q", "gold": "1"}],
                "'answer' with the answer; the columns are question, gold",
            ),
        ],
    )
    def test_a_missing_column_names_those_found(self, tmp_path, name, rows, says):
        with pytest.raises(UserError, match=says):
            load(tmp_path, name, rows)

    def test_a_configured_column_that_is_missing(self, tmp_path):
        with pytest.raises(
            UserError, match="no column 'frage' with the question; the columns are question"
        ):
            load(tmp_path, "jsonl", [{"question": "Q", "answer": "1"}], question_column="frage")
        with pytest.raises(UserError, match="set data.question_column='my question'$"):
            load(tmp_path, "jsonl", [{"my question": "Q"}], question_column="question")


HEADINGS = (
    "#### Step 1\nAdd 2 and 2.\n\n#### Step 2\nSo 4.",
    "I restate it.\n\n#### Step 1\nIt is 4.",
    "In base ####, 4.",
    "#### Step 1: add. #### Step 2: so 4.\nDone.",
)


class TestHashes:
    """Lines that begin with "####": answers as in GSM8K, and headings in Markdown."""

    @pytest.mark.parametrize(
        ("trace", "kept"),
        [
            *((text, text) for text in HEADINGS),
            *((f"{text}\n  #### 4\n\n", text) for text in HEADINGS),
            ("Add 2 and 2. #### 4", "Add 2 and 2. #### 4"),
            ("#### 4", ""),
        ],
    )
    def test_only_an_answer_in_the_last_line_is_removed_from_a_trace(self, tmp_path, trace, kept):
        rows = [{"question": "2+2?", "answer": "4", "cot": trace}]
        ((source, row),) = load(tmp_path, "jsonl", rows, num_groups=1, trace_column=("cot",)).rows
        assert source.trace(row, "cot") == kept

    @pytest.mark.parametrize("column", ["answer", "solution"])
    def test_a_heading_in_a_worked_solution_is_no_answer(self, tmp_path, column):
        rows = [{"question": "2+2?", column: text} for text in HEADINGS]
        rows += [{"question": "1?", column: f"{HEADINGS[0]}\n#### 1"}]
        found = load(tmp_path, "jsonl", rows, num_groups=1)
        assert found.answers[-1] == "1"
        # In the column `solution` only marked answers count, and in `answer` any text.
        assert len(found) == (1 if column == "solution" else len(rows))
        for text, answer in zip(HEADINGS, found.answers[:-1]):
            assert answer.split() == text.removesuffix(".").split()


class TestUnusableRows:
    def test_are_left_out_counted_and_listed(self, tmp_path):
        rows = [
            {"unique_id": "a", "problem": "Q", "solution": "\\boxed{1}"},
            {"unique_id": "b", "problem": "Q", "solution": "\\boxed{}"},
            {"unique_id": "c", "problem": "Q", "solution": "no box, 7"},
            {"unique_id": "d", "problem": " ", "solution": "\\boxed{1}"},
            {"unique_id": "e", "problem": None, "solution": "\\boxed{1}"},
            {"unique_id": "f", "problem": "lone \ud800", "solution": "\\boxed{1}"},
            {"unique_id": "g", "problem": "Q", "solution": "\\boxed{1"},
            {"unique_id": "h", "problem": "Q"},
        ]
        found = load(tmp_path, "math", rows)
        assert found.ids == ["a"]
        reasons = {row.id: row.reason for row in found.left_out}
        assert reasons == {**dict.fromkeys("bcgh", NO_GOLD), **dict.fromkeys("def", NO_QUESTION)}
        assert f"  left out, {NO_GOLD}: 4 (b, c, g and 1 more)" in found.summary()

    def test_a_set_of_which_nothing_is_left(self, tmp_path):
        rows = [{"question": "Q", "answer": ""}, {"question": "Q", "answer": "{"}]
        with pytest.raises(UserError, match="none of the 2 rows can be used .*2 with no answer"):
            load(tmp_path, "jsonl", rows)

    @pytest.mark.parametrize("answer", [True, None, {"value": 1}, ["1", "2"], float("nan")])
    def test_answers_that_are_no_text_or_number(self, tmp_path, answer):
        rows = [{"question": "Q", "answer": answer}, {"question": "Q", "answer": ["3"]}]
        found = load(tmp_path, "jsonl", rows)
        assert found.answers == ["3"] and len(found.left_out) == 1


class TestIdentifiers:
    def test_ids_of_the_source_are_kept_where_they_tell_rows_apart(self, tmp_path):
        rows = [{"id": i, "idx": j, "question": "Q", "answer": "1"} for i, j in ((7, 0), (7, 1))]
        assert load(tmp_path, "jsonl", rows).ids == ["0", "1"]

    def test_else_they_count_rows_also_those_left_out(self, tmp_path):
        rows = [{"id": 7, "question": "Q", "answer": a} for a in ("", "1")]
        assert load(tmp_path, "jsonl", rows).ids == ["jsonl-train-1"]


class TestSolveRates:
    ROWS = [{"id": name, "question": "Q", "answer": "1"} for name in "abcde"]
    LABELS = [
        {"id": name, "avg": rate, "samples": 8}
        for name, rate in zip("edcba", (1.0, 0.75, 0.5, 0.25, 0.0))
    ]

    def load(self, tmp_path, labels, split="train"):
        path = tmp_path / "labels.jsonl"
        path.write_text("\n".join(map(json.dumps, labels)))
        return load(tmp_path, "jsonl", self.ROWS, split, groups="solve_rate", labels=str(path))

    def test_make_the_papers_groups(self, tmp_path):
        # rho > .75, > .5, > .25 and the rest (paper appendix), in the order of the set
        extra = {"id": "not in the set", "avg": 1, "samples": 8}
        found = self.load(tmp_path, [*self.LABELS, extra])
        assert found.groups.tolist() == [3, 3, 2, 1, 0]

    def test_may_be_missing_until_long_prompts_are_left_out(self, tmp_path):
        found = self.load(tmp_path, self.LABELS[:2])
        assert found.groups.tolist() == [NO_GROUP] * 3 + [1, 0]

    def test_are_not_asked_of_test_questions(self, tmp_path):
        assert self.load(tmp_path, self.LABELS[:1], "test").groups.tolist() == [3] * 5


class TestRealSets:
    """All rows of the real data, with the counts their authors publish."""

    @pytest.mark.parametrize(
        ("spec", "split", "size", "left_out"),
        [
            pytest.param("gsm8k:gsm8k/train.jsonl", "train", 7473, 0, marks=pytest.mark.slow),
            pytest.param("gsm8k:gsm8k", "train", 7473, 0, marks=pytest.mark.slow),
            ("gsm8k:gsm8k", "test", 1319, 0),
            pytest.param("math:math/train.jsonl", "train", 7498, 2, marks=pytest.mark.slow),
            ("math500:math500", "test", 500, 0),
        ],
    )
    def test_counts(self, shared_data, spec, split, size, left_out):
        found = load_questions(spec, DataConfig(dir=str(shared_data)), 0, split)
        assert (len(found), len(found.left_out)) == (size, left_out)
        assert len(set(found.ids)) == size

    @pytest.mark.slow
    def test_math_levels_and_subjects(self, shared_data):
        found = load_questions(
            "math:math/train.jsonl", DataConfig(dir=str(shared_data)), 0, "train"
        )
        # two rows have "Level ?"; sizes of the seven subjects as published, less two unusable rows
        np.testing.assert_array_equal(np.bincount(found.levels), [2, 564, 1348, 1592, 1690, 2302])
        names, counts = np.unique(found.subjects, return_counts=True)
        assert dict(zip(names.tolist(), counts.tolist())) == {
            "Algebra": 1744,
            "Counting & Probability": 771,
            "Geometry": 870,
            "Intermediate Algebra": 1295,
            "Number Theory": 869 - 2,
            "Prealgebra": 1205,
            "Precalculus": 746,
        }

    @pytest.mark.parametrize(
        ("spec", "column"),
        [
            ("gsm8k:gsm8k/test.jsonl", "answer"),
            pytest.param("math:math/train.jsonl", "solution", marks=pytest.mark.slow),
            ("math500:math500/test.jsonl", "solution"),
        ],
    )
    def test_golds_grade_right_against_themselves_and_their_solutions(
        self, shared_data, spec, column
    ):
        name, _, path = spec.partition(":")
        found = load_questions(spec, DataConfig(dir=str(shared_data)), 0, "test")
        with (shared_data / path).open() as file:
            rows = [json.loads(line) for line in file]
        gone = {row.id for row in found.left_out}
        solutions = [row[column] for row in rows if row.get("unique_id") not in gone]
        with Grader(workers=1) as grader:
            own = grader.grade([f"\\boxed{{{gold}}}" for gold in found.answers], found.answers)
            # a "####" line is no closed box, which rewards would ask for
            mode = "lenient" if name == "gsm8k" else "strict"
            full = grader.grade(solutions, found.answers, mode=mode)
        assert all(verdict.correct for verdict in own)
        wrong = [text for text, verdict in zip(solutions, full) if not verdict.correct]
        # Digits touch one solution's box, which then is a part of a number and no answer.
        assert all(r"355\boxed{680}" in text for text in wrong) and len(wrong) <= 1

    @pytest.mark.parametrize(
        "spec",
        [
            "gsm8k:gsm8k/test.jsonl",
            pytest.param("math500:math500/test.jsonl", marks=pytest.mark.slow),
            # Those of MATH's training set: tests/grading/test_shared_cases.py.
        ],
    )
    def test_answers_of_other_questions_grade_wrong(self, shared_data, spec):
        found = load_questions(spec, DataConfig(dir=str(shared_data)), 0, "test")
        # Sorted and turned by the longest run of equal answers, no answer meets its own spelling.
        order = np.argsort(np.array(found.answers), kind="stable")
        references = [found.answers[i] for i in order]
        longest = max(map(references.count, set(references)))
        others = references[longest:] + references[:longest]
        assert not any(gold == other for gold, other in zip(references, others))
        with Grader(workers=1) as grader:
            verdicts = grader.grade([f"\\boxed{{{other}}}" for other in others], references)
        # two spellings of one value can still meet: 1/2 and 0.5, 60 and 60 degrees
        assert sum(verdict.correct for verdict in verdicts) <= 0.005 * len(references)


def test_paths_are_asked_for():
    with pytest.raises(UserError, match="use math:PATH"):
        load_questions("math", DataConfig(), 0, "train")


def test_near_duplicates_prompts_and_rows_stay_together(tmp_path):
    rows = [{"id": i, "question": f"Q{i}", "answer": str(i), "type": f"s{i}"} for i in range(4)]
    found = load(tmp_path, "jsonl", rows)
    found = dataclasses.replace(found, duplicates=np.array([True, False, True, False]))
    assert found.unique().ids == ["1", "3"]
    taken = found.take([2, 1])
    assert (taken.subjects, taken.duplicates.tolist()) == (["s2", "s1"], [True, False])
    rest = found.without([3], "too long")
    assert rest.ids == ["0", "1", "2"]
    assert [(row.id, row.reason) for row in rest.left_out] == [("3", "too long")]


def test_verbatim_answers_are_the_text_of_their_column(tmp_path):
    tests = "    assert f(1) == 2\n    assert f(2) == 3\n"
    rows = [
        {"question": "Write f.", "answer": ["assert f() == 1", "assert f() > 0"]},
        {"question": "Say it.", "answer": " Kind, and \\boxed{short "},
        {"question": "Write another f.", "answer": tests},
        {"question": "Say nothing.", "answer": " \n"},
    ]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = DataConfig(dir=str(tmp_path), answers="verbatim", num_groups=1)
    found = load_questions("jsonl:own.jsonl", config, 0, "train")
    texts = ['["assert f() == 1", "assert f() > 0"]', " Kind, and \\boxed{short ", tests]
    assert found.answers == texts
    compile(f"def test():\n{found.answers[2]}", "tests", "exec")
    assert [row.reason for row in found.left_out] == ["no answer that could be graded"]


@pytest.mark.parametrize(
    ("answer", "text"),
    [(float("nan"), []), (["1"], ['["1"]']), (2.5, ["2.5"]), ({"a": 1}, ['{"a": 1}'])],
)
def test_verbatim_answers_that_are_no_text_are_json_or_nothing(tmp_path, answer, text):
    rows = [{"question": "Q", "answer": answer}, {"question": "Q", "answer": "x"}]
    assert load(tmp_path, "jsonl", rows, answers="verbatim", num_groups=1).answers == [*text, "x"]


@pytest.mark.parametrize("answers", ["parsed", "verbatim"])
@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (decimal.Decimal("3.50"), "3.50"),
        (datetime.date(2024, 7, 26), "2024-07-26"),
        (datetime.time(1, 2), "01:02:00"),
        (b"x", "x"),
        (b"\xff", None),
    ],
)
def test_cells_of_parquet_that_json_has_not_are_their_text(tmp_path, answers, cell, text):
    pyarrow = pytest.importorskip("pyarrow", reason="the extra hub is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    kind = pyarrow.scalar(cell).type
    more = b"y" if isinstance(cell, bytes) else cell
    table = pyarrow.table({"question": ["P", "Q"], "answer": pyarrow.array([cell, more], kind)})
    parquet.write_table(table, tmp_path / "a.parquet")
    config = DataConfig(dir=str(tmp_path), answers=answers, num_groups=1)
    found = load_questions("jsonl:a.parquet", config, 0, "train")
    expected = [text, "y" if isinstance(cell, bytes) else text]
    assert found.answers == [one for one in expected if one is not None]


@pytest.mark.parametrize("nested", ["3.50", ["3.50"], {"a": "3.50"}])
def test_decimals_within_cells_of_parquet_are_text_too(tmp_path, nested):
    pyarrow = pytest.importorskip("pyarrow", reason="the extra hub is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    number = decimal.Decimal("3.50")
    made = {str: number, list: [number], dict: {"a": number}}[type(nested)]
    table = pyarrow.table({"question": ["Q"], "answer": [made]})
    parquet.write_table(table, tmp_path / "a.parquet")
    config = DataConfig(dir=str(tmp_path), answers="verbatim", num_groups=1)
    (found,) = load_questions("jsonl:a.parquet", config, 0, "train").answers
    assert found == (nested if isinstance(nested, str) else json.dumps(nested))
