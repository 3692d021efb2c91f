"""The scorers in place of reasoning-gym's: the same scores, and nothing is evaluated."""

import os
import time

import pytest

from bacr_tasks.gym_safe import SCORERS, expression, score_answer

pytest.importorskip("reasoning_gym")


@pytest.fixture(scope="module")
def dataset():
    from reasoning_gym.factory import create_dataset

    made = {}
    return lambda name: made.setdefault(name, create_dataset(name, seed=3, size=30))


def variants(name, item):
    """Benign answers: right, written otherwise, nearly right, no answer at all."""
    gold, metadata = item["answer"], item["metadata"]
    yield from (gold, f" {gold} ", gold.replace(" ", ""), f"({gold})", f"-({gold})", gold[:-1])
    yield from (f"{gold} + 1", f"{gold})", "definitely wrong", "", "1", "x + 1", "1/0")
    if name in ("countdown", "puzzle24"):
        numbers = [str(number) for number in metadata["numbers"]]
        yield from (sign.join(numbers) for sign in ("+", "*", " - ", "/", "%", "//"))
        yield from ("**".join(numbers[:2]), f"{numbers[0]} x {numbers[1]}", f"{gold} = 24", "2.5")
    if name in ("binary_matrix", "spiral_matrix", "n_queens"):
        rows = [row.split() for row in gold.split("\n")]
        yield from (str(rows), str(rows[0]), str([list(map(int, filter(str.isdigit, rows[0])))]))
    if name == "string_insertion":
        yield from (str(list(gold)), str(tuple(gold)), str(list(gold[1:])))
    if "integration" in name:
        x = metadata["variable"]
        yield from (gold.removesuffix(" + C"), f"2*({gold})", f"{gold} + {x}", f"{gold} + log(2)")
        yield from (f"{gold} + sin({x})", f"{gold} - 5", f"0.5*{x}**2 + C", f"{gold} + E*pi")
    if name == "polynomial_multiplication":
        yield from (metadata["polynomial_expr"], gold.replace("**", "^"), f"2*({gold})/2")
        yield " + ".join(reversed(gold.split(" + ")))


@pytest.mark.parametrize("name", sorted({*SCORERS} - {"game_of_life_halting"}))
def test_benign_answers_have_the_scores_of_reasoning_gym(name, dataset):
    seen = set()
    for index in range(4 if "integration" in name else 12):
        item = dataset(name)[index]
        if "Integral" in item["answer"]:
            # Sympy found no antiderivative, and reasoning-gym takes the question for one.
            assert score_answer(name, dataset(name), item["answer"], item) == 0.0
            continue
        for answer in variants(name, item):
            score = score_answer(name, dataset(name), answer, item)
            assert score == dataset(name).score_answer(answer, item), answer
            seen.add(score)
    assert 1.0 in seen and len(seen) > 1


CODE = [
    "__import__('os').system('touch {mark}')",
    "exec('open(\"{mark}\", \"w\")')",
    "[open('{mark}', 'w') for _ in (1,)]",
    "(lambda: open('{mark}', 'w'))()",
    "().__class__.__base__.__subclasses__()",
    "f\"{{open('{mark}', 'w')}}\"",
    "x.__class__.__init__.__globals__['os'].system('touch {mark}')",
    "sin.__module__",
    "N('open(\"{mark}\", \"w\")')",
    "sympify('1')",
    "[*map(exec, ['open(\"{mark}\", \"w\")'])]",
    "x if open('{mark}', 'w') else x",
    "(y := open('{mark}', 'w'))",
    "1\nimport os; os.system('touch {mark}')",
    "Integer(1)", "sin(x, evaluate=False)", "*", "1 if", "lambda: 1", "x[0]", "x.y", "`1`",
]  # fmt: skip
LARGE = [
    "9**9**9", "9**9**9**9", "(9**99)**99", "9**99999999", "x**9**9**9", "9" * 5000, "1e999999999",
    "(" * 5000 + "1" + ")" * 5000, "-" * 50_000 + "1", "1" + "+1" * 50_000, "[" * 10_000,
    "x" * 10_000_000, "1+" * 5_000_000 + "1", "sin(" * 90 + "x" + ")" * 90, "2**-99999999999",
    "[" + "0," * 3_000_000 + "0]", "{" * 300 + "}" * 300, "1\x00", "\x00", "\ud800", "١+٢", "１",
    "²", "0x10", "1_000", "1e3", "1j", "True", "None", "...", "b'1'", "1;2", "a=1", "@x", "nan",
    "inf", "oo", "zoo", "x/0", "0**-1", "0**0", "\r\n", "\ufeff1", "1\u2028", "1%0", "1//0",
]  # fmt: skip


@pytest.mark.parametrize("name", SCORERS)
def test_an_answer_is_never_evaluated_and_costs_little(name, dataset, tmp_path):
    item = dataset(name)[0]
    mark = tmp_path / "ran"
    answers = [code.replace("{mark}", str(mark)) for code in CODE] + LARGE
    for answer in answers:
        began = time.monotonic()
        assert score_answer(name, dataset(name), answer, item) < 1.0, answer[:80]
        assert time.monotonic() - began < 5, answer[:80]
    assert os.listdir(tmp_path) == []


def test_numbers_that_the_check_of_numbers_would_not_see_are_refused(dataset):
    """`3_4` and `0x2` are no numbers to a search for digits between boundaries of words."""
    item = {"metadata": {"numbers": [2, 3], "target": 40}}
    for hidden in ("2*3 + 3_4", "2*3 + 0x22", "2*3 + 34e0", "2*3 + 3_4.0", "2 * 3 + int('34')"):
        assert score_answer("countdown", dataset("countdown"), hidden, item) < 1.0
    item = {"metadata": {"numbers": [2, 3], "target": 6}}
    assert score_answer("countdown", dataset("countdown"), "2*3", item) == 1.0


def test_24_is_made_of_the_four_numbers_exactly(dataset):
    """reasoning-gym takes 24.5 for 24, and any four numbers."""
    item = {"metadata": {"numbers": [8, 1, 2, 3]}}
    score = lambda answer: score_answer("puzzle24", dataset("puzzle24"), answer, item)
    assert [score(answer) for answer in ("8*3*(2 - 1)", " 3*8/(2-1) ")] == [1.0, 1.0]
    for wrong in ("49/2 + 0*8*3", "6*4*1*1", "8*3", "8*3*1", "8*3*1*2", "8*3*(2-1)*1"):
        assert score(wrong) == 0.01
    assert dataset("puzzle24").score_answer("6*4*1*1", item) == 1.0


@pytest.mark.parametrize("answer", ["[NaN, NaN]", '["nan", "nan"]', '["\\u006ean", "n\\u0061n"]'])
def test_nan_is_no_sorted_list(answer, dataset):
    item = {"answer": "['1', '2']", "metadata": {"direction": "ascending"}}
    assert score_answer("number_sorting", dataset("number_sorting"), answer, item) == 0.0
    assert score_answer("number_sorting", dataset("number_sorting"), "['1', '2']", item) == 1.0


@pytest.mark.parametrize("answer", ["nan", "NaN", "n a n", "nani", "1+nanj", "-nan"])
def test_nan_is_no_complex_number(answer, dataset):
    item = {"answer": "1 + 2i", "metadata": {"result": (1.0, 2.0)}}
    assert score_answer("complex_arithmetic", dataset("complex_arithmetic"), answer, item) == 0.0
    right = score_answer("complex_arithmetic", dataset("complex_arithmetic"), "1+2i", item)
    assert right == 1.0


def test_whether_a_game_halts_is_one_of_two_words(dataset):
    item = {"answer": "False"}
    score = lambda answer: score_answer("game_of_life_halting", dataset("n_queens"), answer, item)
    assert [score(answer) for answer in ("False", " false", "True", "no", "0")] == [1, 1, 0, 0, 0]


def test_an_expression_has_numbers_and_the_variables_that_it_may_have():
    import sympy

    x = sympy.Symbol("x")
    assert expression("2*(3 - 1)/8") == sympy.Rational(1, 2)
    assert expression("x**2 + sin(x)", ("x",)) == x**2 + sympy.sin(x)
    for text, names in (("x", ()), ("sin(1)", ()), ("pi", ()), ("y", ("x",)), ("f(x)", ("x",))):
        with pytest.raises(ValueError):
            expression(text, names)
