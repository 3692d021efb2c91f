"""Replaces twelve scorers of reasoning-gym, most of which evaluate an answer as Python code.

Nine scorers call `eval` on the answer, or sympy's `parse_expr`, which calls `eval`. Here the answer
is parsed and its syntax tree is walked: only numbers, names, operators and functions of a short
list are allowed, within bounds. Two other scorers accept NaN, and one accepts any text. The scores
equal reasoning-gym's, except that puzzle24 needs its four numbers and exactly 24.
`gym_score` calls `score_answer`.
"""

import ast
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

# Characters of an expression, and of a list of lists.
MOST_CHARS = 2_000
MOST_LIST_CHARS = 20_000
# Nested brackets in a list.
MOST_BRACKETS = 16
# Levels of a syntax tree. A function call counts as many levels, because sympy simplifies nested
# functions for minutes.
MOST_LEVELS = 100
CALL_LEVELS = 20
# Characters of a variable's name.
MOST_NAME = 12
# Digits of a whole number.
MOST_DIGITS = 30
# Exponents of a number, and of an expression with variables.
MOST_EXPONENT = 100
MOST_POWER = 1_000
# Bits of the result of a power of a number.
MOST_BITS = 4_096
# Matches texts of digits, signs and parentheses, in which `_integers` finds every number.
_ARITHMETIC = re.compile(r"[0-9+\-*/%().\s]*", re.ASCII)
_INTEGER = re.compile(r"\b\d+\b", re.ASCII)
_FUNCTIONS = (
    *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "sinh", "cosh"),
    *("tanh", "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "Abs"),
)
_CONSTANTS = ("pi", "E", "I")

# Arguments: reasoning-gym's data set, the answer, and the item of the question.
Scorer = Callable[[Any, str, Mapping[str, Any]], float]


def expression(text: str, names: Collection[str] | None = ()) -> Any:
    """Parses a text as a sympy expression without evaluating it as code.

    Args:
      names: variables that the text may contain. With (), only numbers are allowed; otherwise
        functions are allowed too. None allows any short name.

    Raises:
      ValueError, SyntaxError, RecursionError, ArithmeticError: it is not an allowed expression.
    """
    text = text.strip()
    if len(text) > MOST_CHARS:
        raise ValueError("too long")
    tree = ast.parse(text, mode="eval")
    return _build(tree.body, names, 0)


def _build(node: ast.expr, names: Collection[str] | None, level: int) -> Any:
    """Builds the expression of a node of a syntax tree at some depth."""
    import sympy

    if level > MOST_LEVELS:
        raise ValueError("too deep")
    if isinstance(node, ast.BinOp):
        left = _build(node.left, names, level + 1)
        right = _build(node.right, names, level + 1)
        return _combine(node.op, left, right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _build(node.operand, names, level + 1)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Constant):
        return _number(node.value)
    if isinstance(node, ast.Name):
        return _variable_or_constant(node.id, names)
    if isinstance(node, ast.Call) and names != ():
        function, argument = _call_parts(node)
        value = _build(argument, names, level + CALL_LEVELS)
        return getattr(sympy, function)(value)
    raise ValueError("not arithmetic")


def _variable_or_constant(name: str, names: Collection[str] | None) -> Any:
    """Returns the symbol or the constant of a name; `names` as in `expression`."""
    import sympy

    if names is not None and name in names:
        return sympy.Symbol(name)
    if names != () and name in _CONSTANTS:
        return getattr(sympy, name)
    if names is None and len(name) <= MOST_NAME and name.isascii():
        return sympy.Symbol(name)
    raise ValueError("not an allowed name")


def _call_parts(node: ast.Call) -> tuple[str, ast.expr]:
    """Returns name and argument of a call, if it calls a function of the list on one argument."""
    has_one_argument = len(node.args) == 1 and not node.keywords
    function = node.func
    if has_one_argument and isinstance(function, ast.Name) and function.id in _FUNCTIONS:
        return function.id, node.args[0]
    raise ValueError("not a function of the list")


def _number(value: object) -> Any:
    """Returns sympy's number of a constant of a syntax tree, if it is a bounded number."""
    import sympy

    if type(value) is int and value < 10**MOST_DIGITS:
        return sympy.Integer(value)
    if type(value) is float and math.isfinite(value):
        return sympy.Float(str(value))
    raise ValueError("not a number, or a large one")


def _combine(sign: ast.operator, left: Any, right: Any) -> Any:
    """Applies an arithmetic operator to two expressions."""
    match sign:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case ast.FloorDiv():
            return left // right
        case ast.Mod():
            return left % right
        case ast.Pow():
            return _power(left, right)
    raise ValueError("not an operator of arithmetic")


def _power(base: Any, exponent: Any) -> Any:
    """Computes a power.

    Raises:
      ValueError: base or exponent is so large that the result may be huge.
    """
    if exponent.is_number:
        most = MOST_EXPONENT if base.is_number else MOST_POWER
        if not (exponent.is_extended_real and abs(exponent) <= most):
            raise ValueError("too large an exponent")
    if base.is_number and base.is_Rational:
        bits = max(base.p.bit_length(), base.q.bit_length())
        if bits > MOST_BITS // MOST_EXPONENT:
            raise ValueError("too large a base")
    return base**exponent


def _literal(text: str) -> Any:
    """Reads a Python literal: a list, tuple, number or text.

    Raises:
      ValueError, SyntaxError: the text is not a literal, too long or too deeply nested.
    """
    if len(text) > MOST_LIST_CHARS:
        raise ValueError("too long")
    depth = 0
    for character in text:
        if character in "[({":
            depth += 1
        elif character in "])}":
            depth -= 1
        if depth > MOST_BRACKETS:
            raise ValueError("too deep")
    return ast.literal_eval(text.lstrip(" \t"))


def _integers(text: str) -> list[int]:
    """Returns the integers in a text."""
    return [int(digits) for digits in _INTEGER.findall(text)]


def _countdown(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Scores an expression that must use all numbers and reach the target."""
    metadata = entry["metadata"]
    target = metadata["target"]
    if not _ARITHMETIC.fullmatch(answer) or not answer.strip():
        return 0.01
    value = float(expression(answer))
    if Counter(_integers(answer)) != Counter(metadata["numbers"]):
        return 0.05
    # reasoning-gym calls numpy.isclose with its default relative tolerance.
    tolerance = 1e-6 + 1e-5 * abs(target)
    return 1.0 if abs(value - target) <= tolerance else 0.05


def _puzzle24(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Scores an expression that must use all four numbers and equal 24."""
    if not _ARITHMETIC.fullmatch(answer):
        return 0.01
    is_24 = expression(answer) == 24
    numbers = entry["metadata"]["numbers"]
    same_numbers = Counter(_integers(answer)) == Counter(numbers)
    return 1.0 if is_24 and same_numbers else 0.01


def _integration(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Scores an antiderivative: its derivative must equal the integrand."""
    import sympy

    name = entry["metadata"]["variable"]
    antiderivative = expression(answer, (name, "C"))
    derivative = sympy.diff(antiderivative, sympy.Symbol(name))
    integrand = expression(entry["metadata"]["integrand"], (name,))
    difference = sympy.simplify(derivative - integrand)
    return float(difference == 0)


def _polynomial_multiplication(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Scores a polynomial, which must have the same expanded form."""
    product = expression(answer, None)
    gold = expression(entry["answer"], None)
    return float(product == gold)


def _binary_matrix(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Scores a matrix; the right matrix as a Python list has a tenth."""
    gold = entry["answer"]
    if answer == gold:
        return 1.0
    text = dataset._matrix_to_str(_literal(answer))
    return 0.1 if text == gold else 0.0


def _spiral_matrix(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Scores numbers with blanks between them; the right numbers as a Python list have a tenth."""
    gold = entry["answer"].strip()
    stripped = answer.strip()
    if stripped == gold:
        return 1.0
    text = " ".join(str(item) for item in _literal(stripped))
    return 0.1 if text == gold else 0.0


def _string_insertion(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Scores a text; the right characters as a Python list have a tenth."""
    gold = entry["answer"]
    if answer == gold:
        return 1.0
    text = "".join(_literal(answer))
    return 0.1 if text == gold else 0.0


def _n_queens(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Scores a board; a right board as a Python list has one half."""
    boards = entry["metadata"]["valid_answers"]
    if answer in boards:
        return 1.0
    board = dataset._board_to_string(_literal(answer))
    return 0.5 if board in boards else 0.0


def _number_sorting(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Scores a list by reasoning-gym, unless it contains NaN."""
    numbers = json.loads(answer.replace("'", '"'))
    if any(math.isnan(float(number)) for number in numbers):
        return 0.0
    return float(dataset.score_answer(answer, entry))


def _complex_arithmetic(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Scores a complex number by reasoning-gym, unless a part of it is NaN."""
    number = dataset.parse_string_to_complex(answer)
    if math.isnan(number.real) or math.isnan(number.imag):
        return 0.0
    return float(dataset.score_answer(answer, entry))


def _game_of_life_halting(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Scores True or False in any case, because reasoning-gym accepts any text."""
    word = answer.strip().lower()
    return float(word == entry["answer"].lower())


# Scorers by the generator's name, each with the score of an answer that can't be parsed.
SCORERS: dict[str, tuple[Scorer, float]] = {
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
    """Scores an answer by the scorer of this module, or by reasoning-gym's without one.

    Args:
      name: name of the generator.
      dataset: reasoning-gym's data set of the generator.
      entry: the item: question, answer and metadata.

    Returns:
      A score in [0, 1].
    """
    if name not in SCORERS:
        return float(dataset.score_answer(answer, entry))
    scorer, unparsable_score = SCORERS[name]
    try:
        return scorer(dataset, answer, entry)
    # Parsers and sympy can raise any error on such a text. Memory is limited for the process.
    except Exception:
        return unparsable_score
