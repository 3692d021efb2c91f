"""The strict mode says yes to one statement of the right value, and to nothing else."""

import collections
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bacr_grading import Grader
from bacr_grading.extract import without_lead_in
from bacr_grading.judge import judge
from bacr_grading.statement import names_counted_noun

_FALSE = Path(__file__).with_name("false_answers.jsonl")


@pytest.mark.parametrize("wrap", ["\\boxed{%s}", "<answer>%s</answer>"])
def test_an_answer_that_says_more_than_its_value_is_wrong(grader, wrap):
    """Negations, hedges, line breaks, elisions, contradictions; a file of hundreds."""
    rows = [json.loads(line) for line in _FALSE.read_text(encoding="utf-8").splitlines()]
    assert min(collections.Counter(row["why"] for row in rows).values()) >= 5
    texts = [wrap % row["pred"] for row in rows]
    verdicts = grader.grade(texts, [row["gold"] for row in rows])
    assert [row for row, verdict in zip(rows, verdicts, strict=True) if verdict.correct] == []


_RIGHT = [
    ("5", "$5$|5.|5.0|x = 5|x=5|= 5|5 cm|5\\text{ cm}|5 eggs|5 miles per hour|5 years old|5 left"),
    (
        "5",
        "2+3=5|\\frac{10}{2}=5|x=\\frac{10}{2}=5|\\sqrt{25}=5|2+1+2=5|5=2+3|5=x|"
        "\\approx 5|x \\approx 5|\\mathbf{5}",
    ),
    (
        "5",
        "5 more apples|5\\text{ times}|5\\text{ km/h}|5 square feet|5 blue marbles|5 people",
    ),
    ("2.5", "\\frac{5}{2}=2.5|2\\frac{1}{2}|x=\\frac{5}{2}=2.5|5/2"),
    ("\\frac{2}{3}", "\\frac{2}{3}\\approx 0.667|\\frac{4}{6}=\\frac{2}{3}|2/3"),
    ("\\frac{\\sqrt{3}}{3}", "\\frac{\\sqrt{3}}{3} \\approx 0.577|\\frac{1}{\\sqrt3}"),
    ("(1,2)", "(x,y) = (1,2)|\\left(1, 2\\right)"),
    ("3,4", "x=3, y=4|4 \\text{ and } 3|\\{3,4\\}|3 or 4"),
    ("3,5", "x\\in\\{3,5\\}|x \\in \\{ 5, 3 \\}"),
    ("3\\text{ or }5", "x=3, x=5|x=3\\text{ or }x=5|3,5"),
    ("x=3\\text{ or }x=5", "x=3, x=5|x = 5; x = 3|3,5|x=3,5"),
    ("x<1\\text{ or }x>3", "x<1, x>3|x > 3, x < 1|x<1\\text{ or }x>3"),
    ("x<1\\text{ or }x>1", "x<1, x>1"),
    ("x=3, y=4", "x=3\\text{ and }y=4|y=4, x=3"),
    ("3", "f^{-1}(2)=3|f^{-1}(f(3))=3|\\text{max}=3|\\overline{x}=3"),
    ("-\\frac{1}{2}", "\\frac{-1}{2}|\\frac{1}{-2}|-\\frac{1}{2}"),
    ("\\begin{pmatrix}1&2\\\\3&5\\end{pmatrix}", "A^{-1}=\\begin{pmatrix}1&2\\\\3&5\\end{pmatrix}"),
    ("\\frac{1}{3}", "0.333333|0.3333333|0.33333333333"),
    ("x \\neq 5", "x \\ne 5|x\\neq5"),
    ("1,2,\\ldots,9", "1, 2, \\ldots, 9"),
    ("x\\le 2", "x <= 2|2 \\ge x|x \\leqslant 2"),
    ("12 \\text{ yuan}", "12|12 yuan|12\\text{ yuan}"),
    ("500000", "5 hundred thousand|5\\text{ hundred thousand}"),
    ("10\\log_{2} 5", "10 \\log_2 5"),
    ("\\frac{2}{3}\\text{ m}", "\\frac{2}{3} \\approx 0.667\\text{ m}"),
    ("f'(x) = 2x+1", "1+2x|f'(x) = 1+2x|f^{\\prime}(x) = 1+2x"),
    ("y + y''", "y'' + y"),
    ("\\frac{3}{4}", "0.75|\\mathbf{\\frac{3}{4}}|{3 \\over 4}|¾"),
    ("2\\sqrt{3}", "2\\sqrt3|2√3|\\sqrt{12}=2\\sqrt{3}|x=2\\sqrt{3}"),
    ("2^{10}", "2^{10}|4^5|1024"),
    ("\\binom{10}{3}", "120|\\binom{10}{7}|\\binom{10}{3}"),
    ("\\frac{1}{2^{98}}", "2^{-98}|\\frac{2}{2^{99}}"),
    ("\\frac{-1+i\\sqrt{3}}{2}", "-\\frac{1}{2}+\\frac{\\sqrt{3}}{2}i"),
    ("\\text{(A)}", "(a)|a|A|\\textbf{(A)}"),
    ("12", "\\text{Area}=12|[ABC]=12|f(3)=12|S_{10}=12|\\angle B=12|AB=12|P(A)=12"),
    ("V=RI", "V=IR"),
    ("x<-1\\text{ or }x>3", "x>3\\text{ or }x<-1|x<-1,x>3"),
    ("3,5", "x=3\\text{ or }x=5|x = 3 or x = 5|x=3\\lor x=5|3 , 5|3\\text{ and }5"),
    ("1:2:3", "2:4:6|1:2:3"),
    ("1:\\sqrt{3}:2", "2:2\\sqrt{3}:4"),
    ("[-2,7]", "-2\\le x\\le 7"),
    ("x^2+1=0", "2x^2+2=0"),
    ("\\frac{(2n)!}{(n!)^2}", "\\binom{2n}{n}"),
    ("1", "1 egg|1 slice|1 cup|1 person|1 fl oz"),
    ("6'", "6|\\sqrt{36}=6|6\\text{ feet}"),
    ("(x,y)=(1,2)", "x=1,y=2|y=2, x=1|(1,2)|(y,x)=(2,1)"),
    ("x=1, y=2", "(1,2)|(x,y)=(1,2)|y=2\\text{ and }x=1"),
    ("\\arctan 2", "\\tan^{-1}(2)|\\tan^{-1} 2|\\theta=\\tan^{-1}(2)"),
    ("\\cot^{-1}(2)", "\\arccot 2"),
    ("1010_2", "(1010)_2|(1010)_{2}|1010|x=(1010)_2"),
    ("2A_{16}", "\\text{2A}_{16}|\\mathrm{2A}_{16}|(2a)_{16}"),
    ("\\text{2A}_{16},\\text{1B}_{16}", "1B_{16}, 2A_{16}|\\text{1B}_{16}\\text{ and }(2A)_{16}"),
    ("3:05\\text{ p.m.}", "3:05|3:05 PM|15:05|3:05\\text{ pm}"),
    ("\\frac{1\\pm\\sqrt3}{2}", "x=\\frac{1\\pm\\sqrt{3}}{2}|\\frac12\\pm\\frac{\\sqrt3}{2}"),
    ("x<1\\text{ or }x>3", "(-\\infty,1)\\cup(3,\\infty)|x\\in(3,\\infty)\\cup(-\\infty,1)"),
    (
        "(-\\infty,1]\\cup[3,\\infty)",
        "x\\le1 or x\\ge3|x \\geq 3 \\text{ or } x \\leq 1|x\\ge3, x\\le1",
    ),
]


def test_one_statement_of_the_value_is_right(grader):
    table = [(ref, answer) for ref, answers in _RIGHT for answer in answers.split("|")]
    texts = [f"<answer>{answer}</answer>" for _, answer in table]
    verdicts = grader.grade(texts, [ref for ref, _ in table])
    assert [row for row, v in zip(table, verdicts, strict=True) if not v.correct] == []


def test_the_unit_of_a_rounded_value_counts():
    for reference in ("\\frac{2}{3}\\text{ m}", "\\frac{2}{3}"):
        text = "\\boxed{\\frac{2}{3}\\text{ m} \\approx 0.667\\text{ cm}}"
        assert judge(text, reference, mode="strict").correct is False


LEAD_INS = """
The final answer is %s.|The answer is %s|the correct answer is: %s.|So the answer is %s.|Answer: %s
Therefore, the final answer is $%s$.|**Final Answer:** %s|**Answer**: %s|Final answer: %s.
The answer to the question is %s.|The result is %s.|My answer is %s.|Thus %s.|Thus, the answer is %s
The final answer is: $%s$. I hope it is correct.|\\text{The answer is }%s|The answer equals %s.
Final Answer: The final answer is $%s$. I hope it is correct.|Answer \\( %s \\)|answer = %s
**The final answer is %s**|$%s$ is the final answer.|The solution is %s.|# Answer: %s
"""


@pytest.mark.parametrize("answer", ["42", "\\frac{1}{2}", "x^2+1"])
def test_a_fixed_sentence_around_the_answer_is_forgiven(grader, answer):
    phrases = [phrase for line in LEAD_INS.strip().splitlines() for phrase in line.split("|")]
    texts = [f"<answer>{phrase % answer}</answer>" for phrase in phrases]
    verdicts = grader.grade(texts, [answer] * len(texts))
    assert [p for p, verdict in zip(phrases, verdicts, strict=True) if not verdict.correct] == []


@pytest.mark.parametrize(
    "text",
    [
        "The final answer is not 42.",
        "The final answer is 42 or 43.",
        "The answer is 41. The answer is 42.",
        "The answer is 42, or maybe 43.",
        "The answer isn't 42",
        "The wrong answer is 42.",
        "The answer is either 41 or 42",
        "The answer is 42 unless it is 41.",
        "One answer is 42",
        "It could be 42.",
        "The answer may be 42",
        "The answer is \\neq 42",
        "The final answer is 6 \\\\ 42",
        "\\text{The answer is not }42",
        "42 is not the final answer",
        "41. I hope it is correct. 42",
    ],
)
def test_no_other_sentence_is(grader, text):
    assert not grader.grade([f"<answer>{text}</answer>"], ["42"])[0].correct


def test_a_lead_in_goes_once_and_leaves_something():
    assert without_lead_in("The answer is The answer is 5") == "The answer is 5"
    for text in ("The answer is", "The answer is ", "answer:", "42", "x", "", "so"):
        assert without_lead_in(text) == text


def test_the_reports_know_what_the_rewards_would_say():
    texts = [
        "\\boxed{\\neq 5}",
        "\\boxed{6 \\\\ 5}",
        "\\boxed{2+3=5}",
        "<answer>Answer: 5</answer>",
    ]
    with Grader(workers=1) as grader:
        verdicts = grader.grade(texts, ["5"] * 4, mode="lenient")
        assert [verdict.strict for verdict in verdicts] == [False, False, True, True]
        strict = grader.grade(texts, ["5"] * 4, mode="strict")
        assert [v.correct for v in strict] == [v.strict for v in verdicts]


@pytest.mark.parametrize(
    "words", ["eggs", "cm", "square feet", "km/h", "years old", "yuan", "people"]
)
def test_units_and_things_that_are_counted_say_nothing_else(words):
    assert names_counted_noun(words)


@pytest.mark.parametrize(
    "words", ["maybe", "six", "eggs six", "probably", "xyzzy", "eggs, 6", "or 6", "a b c s", "Üs"]
)
def test_other_words_might(words):
    assert not names_counted_noun(words)
    assert names_counted_noun(words, reference=words)


@settings(max_examples=200)
@given(st.text(alphabet="The final answer is:=*#$\\text{}. 4\n", max_size=80))
def test_what_a_lead_in_leaves_is_a_part_of_the_answer(text):
    rest = without_lead_in(text)
    assert rest == text or rest in " ".join(text.split())
