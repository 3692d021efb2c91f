"""Replaces twelve scorers of reasoning-gym, most of which evaluate the answer as Python code.

Nine of the original scorers call `eval` on the answer, either directly or through sympy's
`parse_expr`. The replacements parse the answer to a syntax tree and accept only numbers, names,
operators and a few functions, with limits on their size. Two other scorers are replaced because
they accept NaN, and one because it accepts any text. The scores are the same as in reasoning-gym,
except that puzzle24 requires its four numbers and a result of exactly 24. `gym_score` calls
`score_answer`.
"""

import ast
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

# Maximum length in characters of an expression, and of a list of lists.
MOST_CHARS = 2_000
MOST_LIST_CHARS = 20_000
# Maximum nesting depth of brackets in a list.
MOST_BRACKETS = 16
# Maximum depth of a syntax tree. A function call counts as several levels, because sympy can take
# minutes to simplify nested functions.
MOST_LEVELS = 100
CALL_LEVELS = 20
# Maximum length in characters of a variable name.
MOST_NAME = 12
# Maximum number of digits of an integer.
MOST_DIGITS = 30
# Maximum absolute value of the exponent in a power of a number, and in a power of an expression
# with variables.
MOST_EXPONENT = 100
MOST_POWER = 1_000
# Maximum number of bits in the power of a number.
MOST_BITS = 4_096
# Text that contains only digits, operators, parentheses and whitespace. `_integers` finds every
# number in such text.
_ARITHMETIC = re.compile(r"[0-9+\-*/%().\s]*", re.ASCII)
_INTEGER = re.compile(r"\b\d+\b", re.ASCII)
# Functions and constants that an expression may contain.
_FUNCTIONS = (
    *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "acot", "sinh", "cosh"),
    *("tanh", "asinh", "acosh", "atanh", "exp", "log", "ln", "sqrt", "Abs"),
)
_CONSTANTS = ("pi", "E", "I")

# Function that returns the score of an answer. Its arguments are reasoning-gym's data set, the
# answer, and the item with the question.
Scorer = Callable[[Any, str, Mapping[str, Any]], float]


def expression(text: str, names: Collection[str] | None = ()) -> Any:
    """Parses text as a sympy expression without evaluating it as code.

    Args:
      text: the expression in Python syntax.
      names: names of the allowed variables, or None to allow any short name. If it is `()`,
        functions and constants are not allowed either, only numbers and operators.

    Raises:
      ValueError, SyntaxError, RecursionError, ArithmeticError: if the text is not an allowed
        expression.
    """
    text = text.strip()
    if len(text) > MOST_CHARS:
        raise ValueError(f"the text has more than {MOST_CHARS} characters")
    tree = ast.parse(text, mode="eval")
    return _build(tree.body, names, 0)


def _build(node: ast.expr, names: Collection[str] | None, level: int) -> Any:
    """Converts a node of a Python syntax tree to a sympy expression.

    Args:
      node: the node to convert.
      names: allowed variables, as in `expression`.
      level: depth of the node in the tree.
    """
    import sympy

    if level > MOST_LEVELS:
        raise ValueError(f"the expression is nested more than {MOST_LEVELS} levels deep")
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
    raise ValueError("the text is not an arithmetic expression")


def _variable_or_constant(name: str, names: Collection[str] | None) -> Any:
    """Returns the sympy symbol or constant with a given name.

    Raises:
      ValueError: if `names`, which `expression` describes, does not allow the name.
    """
    import sympy

    if names is not None and name in names:
        return sympy.Symbol(name)
    if names != () and name in _CONSTANTS:
        return getattr(sympy, name)
    if names is None and len(name) <= MOST_NAME and name.isascii():
        return sympy.Symbol(name)
    raise ValueError("the expression contains a name that is not allowed")


def _call_parts(node: ast.Call) -> tuple[str, ast.expr]:
    """Returns the function name and the argument of a call.

    Raises:
      ValueError: if the function is not in `_FUNCTIONS`, or if it is not called with exactly one
        positional argument.
    """
    has_one_argument = len(node.args) == 1 and not node.keywords
    function = node.func
    if has_one_argument and isinstance(function, ast.Name) and function.id in _FUNCTIONS:
        return function.id, node.args[0]
    raise ValueError("the expression calls a function that is not allowed")


def _number(value: object) -> Any:
    """Converts a constant of a syntax tree to a sympy number.

    Raises:
      ValueError: if the constant is not a number, or if it is too large.
    """
    import sympy

    if type(value) is int and value < 10**MOST_DIGITS:
        return sympy.Integer(value)
    if type(value) is float and math.isfinite(value):
        return sympy.Float(str(value))
    raise ValueError("the expression contains a constant that is not a number, or is too large")


def _combine(sign: ast.operator, left: Any, right: Any) -> Any:
    """Applies a binary arithmetic operator to two sympy expressions."""
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
    raise ValueError("the expression contains an operator that is not arithmetic")


def _power(base: Any, exponent: Any) -> Any:
    """Computes a power of two sympy expressions.

    Raises:
      ValueError: if the base or the exponent is so large that the result could be huge.
    """
    if exponent.is_number:
        most = MOST_EXPONENT if base.is_number else MOST_POWER
        if not (exponent.is_extended_real and abs(exponent) <= most):
            raise ValueError("the exponent of a power is too large")
    if base.is_number and base.is_Rational:
        bits = max(base.p.bit_length(), base.q.bit_length())
        if bits > MOST_BITS // MOST_EXPONENT:
            raise ValueError("the base of a power is too large")
    return base**exponent


def _literal(text: str) -> Any:
    """Parses a Python literal, such as a list, a tuple, a number or a string.

    Raises:
      ValueError, SyntaxError: if the text is not a literal, is too long, or is nested too deeply.
    """
    if len(text) > MOST_LIST_CHARS:
        raise ValueError(f"the text has more than {MOST_LIST_CHARS} characters")
    depth = 0
    for character in text:
        if character in "[({":
            depth += 1
        elif character in "])}":
            depth -= 1
        if depth > MOST_BRACKETS:
            raise ValueError(f"the list is nested more than {MOST_BRACKETS} levels deep")
    return ast.literal_eval(text.lstrip(" \t"))


def _integers(text: str) -> list[int]:
    """Returns all integers in a text, in order of appearance."""
    return [int(digits) for digits in _INTEGER.findall(text)]


def _countdown(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Scores an expression that must use each given number once and equal the target."""
    metadata = entry["metadata"]
    target = metadata["target"]
    if not _ARITHMETIC.fullmatch(answer) or not answer.strip():
        return 0.01
    value = float(expression(answer))
    if Counter(_integers(answer)) != Counter(metadata["numbers"]):
        return 0.05
    # reasoning-gym calls numpy.isclose with its default relative tolerance, 1e-5.
    tolerance = 1e-6 + 1e-5 * abs(target)
    return 1.0 if abs(value - target) <= tolerance else 0.05


def _puzzle24(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Scores an expression that must use each of the four given numbers once and equal 24."""
    if not _ARITHMETIC.fullmatch(answer):
        return 0.01
    is_24 = expression(answer) == 24
    numbers = entry["metadata"]["numbers"]
    same_numbers = Counter(_integers(answer)) == Counter(numbers)
    return 1.0 if is_24 and same_numbers else 0.01


def _integration(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Scores an antiderivative, whose derivative must equal the integrand."""
    import sympy

    name = entry["metadata"]["variable"]
    antiderivative = expression(answer, (name, "C"))
    derivative = sympy.diff(antiderivative, sympy.Symbol(name))
    integrand = expression(entry["metadata"]["integrand"], (name,))
    difference = sympy.simplify(derivative - integrand)
    return float(difference == 0)


def _polynomial_multiplication(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Scores a polynomial, which must be expanded and equal the expected polynomial."""
    product = expression(answer, None)
    gold = expression(entry["answer"], None)
    return float(product == gold)


def _binary_matrix(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Scores a matrix. The correct matrix in the syntax of a Python list scores only 0.1."""
    gold = entry["answer"]
    if answer == gold:
        return 1.0
    text = dataset._matrix_to_str(_literal(answer))
    return 0.1 if text == gold else 0.0


def _spiral_matrix(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Scores numbers separated by spaces. The correct numbers as a Python list score only 0.1."""
    gold = entry["answer"].strip()
    stripped = answer.strip()
    if stripped == gold:
        return 1.0
    text = " ".join(str(item) for item in _literal(stripped))
    return 0.1 if text == gold else 0.0


def _string_insertion(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Scores a string. The correct characters as a Python list score only 0.1."""
    gold = entry["answer"]
    if answer == gold:
        return 1.0
    text = "".join(_literal(answer))
    return 0.1 if text == gold else 0.0


def _n_queens(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Scores a chess board. A valid board in the syntax of a Python list scores only 0.5."""
    boards = entry["metadata"]["valid_answers"]
    if answer in boards:
        return 1.0
    board = dataset._board_to_string(_literal(answer))
    return 0.5 if board in boards else 0.0


def _number_sorting(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Scores a list with reasoning-gym's scorer, or returns 0 if the list contains NaN."""
    numbers = json.loads(answer.replace("'", '"'))
    if any(math.isnan(float(number)) for number in numbers):
        return 0.0
    return float(dataset.score_answer(answer, entry))


def _complex_arithmetic(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Scores a complex number with reasoning-gym's scorer, or returns 0 if a part of it is NaN."""
    number = dataset.parse_string_to_complex(answer)
    if math.isnan(number.real) or math.isnan(number.imag):
        return 0.0
    return float(dataset.score_answer(answer, entry))


def _game_of_life_halting(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """Compares the answer with the expected `True` or `False`, ignoring case.

    reasoning-gym's scorer accepts any text.
    """
    word = answer.strip().lower()
    return float(word == entry["answer"].lower())


# Replacement scorers by the name of the generator, each with the score of an answer that cannot be
# parsed.
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
    """Scores an answer with the replacement scorer of this module, or with reasoning-gym's scorer.

    Args:
      name: name of the generator.
      dataset: reasoning-gym's data set of the generator.
      answer: the answer to score.
      entry: the item, with its question, answer and metadata.

    Returns:
      A score in [0, 1].
    """
    if name not in SCORERS:
        return float(dataset.score_answer(answer, entry))
    scorer, unparsable_score = SCORERS[name]
    try:
        return scorer(dataset, answer, entry)
    # Parsers and sympy can raise any exception on malformed answers, including MemoryError, because
    # the memory of this process is limited.
    except Exception:
        return unparsable_score
