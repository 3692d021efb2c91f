"""Scorers in place of the scorers of reasoning-gym that evaluate an answer as Python.

Nine of its scorers call `eval`, or sympy's `parse_expr`, which is `eval`, on the answer. Here an
answer is parsed and its syntax tree walked: only numbers, names, operators and functions of a short
list have a meaning, within bounds. Two more take NaN for right, and one takes any text. Scores are
reasoning-gym's, except that puzzle24 needs its four numbers and exactly 24.
"""

import ast
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

# Characters of an expression, and of a list of lists; levels of brackets in a list.
MOST_CHARS, MOST_LIST_CHARS, MOST_BRACKETS = 2_000, 20_000, 16
# Levels of a syntax tree, how many of them a function counts for (sympy simplifies functions of
# functions for minutes), and characters of a name.
MOST_LEVELS, CALL_LEVELS, MOST_NAME = 100, 20, 12
# Digits of a number, and the exponents of a number and of anything else.
MOST_DIGITS, MOST_EXPONENT, MOST_POWER = 30, 100, 1_000
# Bits of a number that is the base or the result of a power.
MOST_BITS = 4_096
# Digits, signs and parentheses: every number in it is seen by `_integers`.
_ARITHMETIC = re.compile(r"[0-9+\-*/%().\s]*", re.ASCII)
_INTEGER = re.compile(r"\b\d+\b", re.ASCII)
_FUNCTIONS = (
    *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "sinh", "cosh"),
    *("tanh", "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "Abs"),
)
_CONSTANTS = ("pi", "E", "I")

Score = Callable[[Any, str, Mapping[str, Any]], float]


def expression(text: str, names: Any = ()) -> Any:
    """The sympy expression that a text is, without evaluating the text.

    Args:
      names: variables that it may have, and with them functions; none: numbers alone; None: any
        short name is a variable.

    ValueError, SyntaxError, RecursionError, ArithmeticError: it is none, or too large.
    """
    text = text.strip()
    if len(text) > MOST_CHARS:
        raise ValueError("too long")
    return _built(ast.parse(text, mode="eval").body, names, 0)


def _built(node: ast.expr, names: Any, level: int) -> Any:
    """The expression of a part of a syntax tree."""
    import sympy

    if level > MOST_LEVELS:
        raise ValueError("too deep")
    if isinstance(node, ast.BinOp):
        left = _built(node.left, names, level + 1)
        right = _built(node.right, names, level + 1)
        return _joined(node.op, left, right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _built(node.operand, names, level + 1)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Constant):
        return _number(node.value)
    if isinstance(node, ast.Name):
        if names is not None and node.id in names:
            return sympy.Symbol(node.id)
        if names != () and node.id in _CONSTANTS:
            return getattr(sympy, node.id)
        if names is None and len(node.id) <= MOST_NAME and node.id.isascii():
            return sympy.Symbol(node.id)
    if isinstance(node, ast.Call) and names != ():
        function, argument = _called(node)
        return getattr(sympy, function)(_built(argument, names, level + CALL_LEVELS))
    raise ValueError("no arithmetic")


def _called(node: ast.Call) -> tuple[str, ast.expr]:
    """The name of the function that is called, one of the list, and its argument."""
    alone = len(node.args) == 1 and not node.keywords
    if alone and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        return node.func.id, node.args[0]
    raise ValueError("no function of the list")


def _number(value: object) -> Any:
    """A number of a syntax tree."""
    import sympy

    if type(value) is int and value < 10**MOST_DIGITS:
        return sympy.Integer(value)
    if type(value) is float and math.isfinite(value):
        return sympy.Float(str(value))
    raise ValueError("no number, or a large one")


def _joined(sign: ast.operator, left: Any, right: Any) -> Any:
    """What an operator makes of two expressions."""
    if isinstance(sign, ast.Add):
        return left + right
    if isinstance(sign, ast.Sub):
        return left - right
    if isinstance(sign, ast.Mult):
        return left * right
    if isinstance(sign, ast.Div):
        return left / right
    if isinstance(sign, ast.FloorDiv):
        return left // right
    if isinstance(sign, ast.Mod):
        return left % right
    if not isinstance(sign, ast.Pow):
        raise ValueError("no operator of arithmetic")
    if right.is_number:
        most = MOST_EXPONENT if left.is_number else MOST_POWER
        if not (right.is_extended_real and abs(right) <= most):
            raise ValueError("too large an exponent")
    if (
        left.is_number
        and left.is_Rational
        and max(left.p.bit_length(), left.q.bit_length()) > (MOST_BITS // MOST_EXPONENT)
    ):
        raise ValueError("too large a base")
    return left**right


def _literal(text: str) -> Any:
    """A list, tuple, number or text as Python writes it; ValueError, SyntaxError: it is none."""
    if len(text) > MOST_LIST_CHARS:
        raise ValueError("too long")
    depth = 0
    for character in text:
        depth += (character in "[({") - (character in "])}")
        if depth > MOST_BRACKETS:
            raise ValueError("too deep")
    return ast.literal_eval(text.lstrip(" \t"))


def _integers(text: str) -> list[int]:
    """Returns the integers in a text."""
    return [int(digits) for digits in _INTEGER.findall(text)]


def _countdown(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    metadata = entry["metadata"]
    if not _ARITHMETIC.fullmatch(answer) or not answer.strip():
        return 0.01
    value = float(expression(answer))
    if Counter(_integers(answer)) != Counter(metadata["numbers"]):
        return 0.05
    # numpy.isclose with its default relative tolerance.
    near = abs(value - metadata["target"]) <= 1e-6 + 1e-5 * abs(metadata["target"])
    return 1.0 if near else 0.05


def _puzzle24(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    if not _ARITHMETIC.fullmatch(answer):
        return 0.01
    right = expression(answer) == 24
    same_numbers = Counter(_integers(answer)) == Counter(entry["metadata"]["numbers"])
    return 1.0 if right and same_numbers else 0.01


def _integration(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    import sympy

    name = entry["metadata"]["variable"]
    variable = sympy.Symbol(name)
    derivative = sympy.diff(expression(answer, (name, "C")), variable)
    integrand = expression(entry["metadata"]["integrand"], (name,))
    return float(sympy.simplify(derivative - integrand) == 0)


def _polynomial_multiplication(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    return float(expression(answer, None) == expression(entry["answer"], None))


def _binary_matrix(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    if answer == entry["answer"]:
        return 1.0
    return 0.1 if dataset._matrix_to_str(_literal(answer)) == entry["answer"] else 0.0


def _spiral_matrix(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    gold = entry["answer"].strip()
    if answer.strip() == gold:
        return 1.0
    return 0.1 if " ".join(str(item) for item in _literal(answer.strip())) == gold else 0.0


def _string_insertion(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    if answer == entry["answer"]:
        return 1.0
    return 0.1 if "".join(_literal(answer)) == entry["answer"] else 0.0


def _n_queens(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    boards = entry["metadata"]["valid_answers"]
    if answer in boards:
        return 1.0
    return 0.5 if dataset._board_to_string(_literal(answer)) in boards else 0.0


def _number_sorting(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    numbers = json.loads(answer.replace("'", '"'))
    if any(math.isnan(float(number)) for number in numbers):
        return 0.0
    return float(dataset.score_answer(answer, entry))


def _complex_arithmetic(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    number = dataset.parse_string_to_complex(answer)
    if math.isnan(number.real) or math.isnan(number.imag):
        return 0.0
    return float(dataset.score_answer(answer, entry))


def _game_of_life_halting(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    return float(answer.strip().lower() == entry["answer"].lower())


# By a generator's name: its scorer here, and the score of an answer that this finds no sense in.
SCORERS: dict[str, tuple[Score, float]] = {
    "countdown": (_countdown, 0.01),
    "puzzle24": (_puzzle24, 0.01),
    "simple_integration": (_integration, 0.0),
    "intermediate_integration": (_integration, 0.0),
    "polynomial_multiplication": (_polynomial_multiplication, 0.0),
    "binary_matrix": (_binary_matrix, 0.0),
    "spiral_matrix": (_spiral_matrix, 0.0),
    "string_insertion": (_string_insertion, 0.0),
    "n_queens": (_n_queens, 0.0),
    "number_sorting": (_number_sorting, 0.0),
    "complex_arithmetic": (_complex_arithmetic, 0.0),
    "game_of_life_halting": (_game_of_life_halting, 0.0),
}


def score_answer(name: str, dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """The score of an answer, by the scorer here if there is one, else by the generator's own."""
    if name not in SCORERS:
        return float(dataset.score_answer(answer, entry))
    scorer, senseless = SCORERS[name]
    try:
        return scorer(dataset, answer, entry)
    # Parsers and sympy raise as they may on what makes no sense; memory is the fork's.
    except Exception:
        return senseless
