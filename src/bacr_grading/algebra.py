"""Compares two answers with math-verify and sympy. Runs in worker processes only.

math-verify parses both answers and selects the parts to compare. This module replaces six of its
functions, its LaTeX parser and its removal of units. The originals treat some different values as
equal: numbers that differ by less than 1e-16, letters of different case, equations without real
solutions, the letter `I` and the imaginary unit, and `5` and `5t`.
"""

import re
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import math_verify.grader as verification
import math_verify.parser as parsing
import sympy
from latex2sympy2_extended import math_normalization as normalization
from latex2sympy2_extended import symbols as letters
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.relational import Relational

from bacr_grading.normalize import VARIABLE, split_unit
from bacr_grading.parsed_answer import ParsedAnswer, both_signs
from bacr_grading.relations import as_union, values_by_name
from bacr_grading.statement import names_counted_noun

# Number of decimal places to which decimals must agree (docs/grading.md, rule 2).
PLACES = 6
# Number of digits in the first numerical comparison of two constants.
FIRST_DIGITS = 40
# Number of digits in the final numerical comparison, used if symbolic simplification fails.
LAST_DIGITS = 500
# Values substituted for the variables of two expressions to compare them before simplification.
_POINTS = tuple(sympy.Rational(n, 7) for n in (11, 17, 23, 31, 41, 47, 59, 61, 67, 73))

_WORDS = r"\\(?:text[a-z]*|mbox|operatorname|mathrm)\s*\{[^{}]*\}|\\[A-Za-z]+"
_CURRENT = re.compile(rf"({_WORDS})|(?<!_)(\^?)I")
_TRANSPOSED = re.compile(r"\^\s*(?:T|\{\s*T\s*\}|\{?\s*\\(?:top|intercal)\s*\}?)")
_PRIMES = re.compile(r"(?<!\d)'+")
# Words without \text after a number, a root or \pi.
_BARE_WORDS = re.compile(r"(.*(?:[\d})]|\\pi))\s+([A-Za-z][A-Za-z ./]*)", re.DOTALL)
_LONG_WORD = re.compile(r"[A-Za-z]{3}")
_TEXT = re.compile(r"\\(?:text[a-z]*|mbox|mathrm)\s*\{[^{}]*\}")
# Units at the end of an answer, such as \text{ cm}^2 and \text{m}/\text{s}.
_UNITS = re.compile(
    r"\\(?:text|mbox)\{[^{}]*\}(?:\^(?:\d|\{-?\d+\}))?"
    r"(?:(?:[\s/*]|\\cdot(?![A-Za-z]))*\\(?:text|mbox)\{[^{}]*\}(?:\^(?:\d|\{-?\d+\}))?)*$"
)
_IMAGINARY = sympy.Symbol("i", real=True)
# Replaces the i that is no name, until all variables are complex.
_UNIT = sympy.Symbol("i")
_INEQUALITIES = (sympy.Gt, sympy.Ge, sympy.Lt, sympy.Le)
# Expressions whose members may be relations.
_COMPOUND = (Relational, sympy.And, sympy.FiniteSet, sympy.Tuple)


def compare(
    answer: str,
    reference: str,
    prose: bool = False,
    reference_is_prose: bool = False,
    search: bool = True,
    places: int = PLACES,
) -> dict[str, Any]:
    """Compares one answer with its reference.

    Args:
      answer: the answer.
      reference: the reference answer.
      prose: True if `answer` is prose, from which math-verify extracts the answer.
      reference_is_prose: True if `reference` is prose.
      search: if True, the answer is also correct if only a part of it matches the reference. If
        False, the whole answer must match.
      places: number of decimal places to which decimals must agree.

    Returns:
      A dict. "correct" is True if the answer is correct. "whole" is True if the whole answer could
      be parsed and is correct. For prose, "found" is the part of the text that was compared.
    """
    if not prose and not reference_is_prose:
        values = values_by_name(ParsedAnswer(answer), ParsedAnswer(reference))
        if values is not None:
            return _compare_values(*values, search=search, places=places)
        answer, reference = _alike(answer, reference)
    if not prose:
        gold = _reference(reference, True) if reference_is_prose else _parse_whole(reference)
        gold = [part for part in gold if not _is_plain_equation(part)]
        is_same = verify(
            gold,
            _parse_whole(answer),
            float_rounding=places,
            timeout_seconds=None,
            allow_set_relation_comp=True,
        )
        if is_same or not search:
            return {"correct": is_same, "whole": is_same}
    text = answer if prose else f"\\boxed{{{_unambiguous(answer)}}}"
    target = parse(text, parsing_timeout=None)
    correct = verify(_reference(reference, reference_is_prose), target, timeout_seconds=None)
    if not prose:
        return {"correct": correct}
    # The last string in math-verify's result is the text that it parsed.
    compared_text = next((part for part in reversed(target) if isinstance(part, str)), "")
    if not correct and not reference_is_prose:
        value, _ = _alike(compared_text, reference)
        if value != compared_text:
            correct = compare(value, reference, search=search, places=places)["correct"]
    return {"correct": correct, "found": compared_text[:2000]}


def _compare_values(
    values: Sequence[ParsedAnswer], targets: Sequence[ParsedAnswer], *, search: bool, places: int
) -> dict[str, Any]:
    """Compares the values of several variables with their references, as `compare` does."""
    if len(values) != len(targets):
        return {"correct": False, "whole": False}
    results = [
        compare(value.text, target.text, search=search, places=places)
        for value, target in zip(values, targets, strict=True)
    ]
    return {name: all(result.get(name) for result in results) for name in ("correct", "whole")}


def _alike(answer: str, reference: str) -> tuple[str, str]:
    r"""Rewrites an answer and its reference, so that math-verify can compare them.

    Units without `\text` are removed. If one of the texts is a union of intervals, inequalities in
    the other are rewritten as such a union.
    """
    # Two letters may be a unit or a product, as in 2\pi hr. In an answer they are a unit if the
    # reference has no variable. The letters of a unit such as \text{ cm} are not variables.
    has_variable = VARIABLE.search(_TEXT.sub("", reference)) is not None
    answer = _without_unit(answer, short=not has_variable)
    reference = _without_unit(reference, short=False)
    if "\\cup" in reference:
        return as_union(answer), reference
    return answer, as_union(reference) if "\\cup" in answer else reference


def _without_unit(text: str, *, short: bool) -> str:
    r"""Removes a unit or a counted noun after a constant, such as feet in `10\pi feet`.

    Args:
      text: the answer or the reference.
      short: if True, also removes units with two letters.
    """
    match = _BARE_WORDS.fullmatch(text)
    number_and_words = (match[1], match[2]) if match else split_unit(text)
    if number_and_words is None:
        return text
    number, words = number_and_words
    is_long = len(words) > 1 if short else _LONG_WORD.search(words)
    is_unit = is_long and names_counted_noun(words) and not VARIABLE.search(number)
    return number if is_unit else text


def warm_up() -> None:
    """Builds the parser's tables, so that the first request does not have to wait for them."""
    for sample in ("\\frac{1}{2}", "x^2 + \\sqrt{3}", "(1, 2)"):
        compare(sample, "1")


def _is_plain_equation(part: Any) -> bool:
    """True if a parsed reference is a relation without variables, such as 2 + 3 = 5.

    Such references are dropped, because math-verify would treat any two of them as equal.
    """
    return getattr(part, "is_Relational", False) and not part.free_symbols


@lru_cache(maxsize=256)
def _parse_whole(text: str) -> list[Any]:
    """Parses a text with math-verify, or returns an empty list unless all of it can be parsed."""
    return parse(
        f"\\boxed{{{_unambiguous(text)}}}",
        extraction_config=[LatexExtractionConfig()],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )


@lru_cache(maxsize=256)
def _reference(text: str, is_prose: bool) -> list[Any]:
    boxed = text if is_prose else f"\\boxed{{{_unambiguous(text)}}}"
    return parse(boxed, parsing_timeout=None)


def _unambiguous(text: str) -> str:
    r"""Rewrites symbols that the LaTeX parser ignores or misinterprets.

    The parser ignores primes and the exponent T, parses the letter I as the imaginary unit, and
    does not parse `\pm` inside of an expression. A prime after a digit means feet and is not
    changed.
    """
    text = _PRIMES.sub(_exponent_of_primes, both_signs(text))
    text = _TRANSPOSED.sub(r"^{\\mathcal{T}}", text)
    return _CURRENT.sub(_letter, text) if "I" in text else text


def _exponent_of_primes(run: re.Match[str]) -> str:
    return "^{" + r"\prime" * len(run[0]) + "}"


def _letter(match: re.Match[str]) -> str:
    if match[1]:
        return match[1]
    return r"^{\mathcal{I}}" if match[2] else r"\mathcal{I}"


# --- replacements of math-verify's comparisons ----------------------------------------------------


# Exceptions that sympy raises if an expression cannot be evaluated or has no truth value.
_NO_VALUE = (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError)


def _numeric_eq(a: Any, b: Any, places: int, precision: int) -> bool:
    """True if two constants, or two matrices of constants, have the same value."""
    try:
        return _same_value(a, b, places)
    except _NO_VALUE:
        return False


def _same_value(a: Any, b: Any, places: int) -> bool:
    """True if two sympy constants, or two matrices, have the same value.

    Values with decimal fractions are compared after rounding to `places` decimal places, and exact
    values are compared exactly. Expressions with variables are never equal.

    Raises:
      Exception: one of the types in `_NO_VALUE`, if sympy cannot evaluate a value.
    """
    matrices = (sympy.MatrixBase, sympy.MatrixExpr)
    if isinstance(a, matrices) and isinstance(b, matrices):
        return _same_matrix(a, b, places)
    if any(verification.get_pct_val(x, None) is not None for x in (a, b)):
        a_number = verification.get_pct_val(a, a)
        b_number = verification.get_pct_val(b, b)
        if a_number.is_Integer and b_number.is_Integer:
            return bool(a_number == b_number)
    left = verification.safe_sympy_doit(a)
    right = verification.safe_sympy_doit(b)
    if left.free_symbols or right.free_symbols:
        return False
    if left.has(sympy.Float) or right.has(sympy.Float):
        return _close(left, right, places)
    return _same_constant(left, right)


def _same_matrix(a: Any, b: Any, places: int) -> bool:
    """True if two matrices have the same shape and equal entries."""
    a = verification.safe_sympy_doit(a)
    b = verification.safe_sympy_doit(b)
    if getattr(a, "shape", None) != getattr(b, "shape", None):
        return False
    if not hasattr(a, "flat"):
        return False
    return all(
        _same_value(x, y, places) or _symbolic_eq(x, y)
        for x, y in zip(a.flat(), b.flat(), strict=True)
    )


def _close(a: Any, b: Any, places: int) -> bool:
    """True if two numbers agree after rounding to `places` decimal places.

    If `places` is at least `PLACES`, the relative error must also be at most 0.1 %.
    """
    if a.round(places) != b.round(places):
        return False
    if places < PLACES:
        return True
    error = abs(a - b).evalf(FIRST_DIGITS)
    return bool(1000 * error <= abs(b).evalf(FIRST_DIGITS))


def _same_constant(a: Any, b: Any) -> bool:
    """True if two exact constants, which contain no floats, are the same number."""
    if a == b:
        return True
    if (a.is_Rational and b.is_Rational) or a.is_infinite or b.is_infinite:
        return False
    if _differ(a, b, FIRST_DIGITS):
        return False
    difference = sympy.simplify(sympy.expand(a - b))
    if difference.is_zero:
        return True
    if difference.is_Rational:
        return False
    if difference.has(sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit):
        return True
    return not _differ(a, b, LAST_DIGITS)


def _differ(a: Any, b: Any, digits: int) -> bool:
    """True if two constants differ when they are evaluated to `digits` significant digits.

    Relative differences below 10^(-3/4 * digits) are ignored, because they may be rounding errors.
    """
    left = a.evalf(digits, maxn=2 * digits)
    right = b.evalf(digits, maxn=2 * digits)
    scale = max(abs(left), abs(right))
    tolerance = sympy.Float(10, digits) ** (-3 * digits // 4)
    return bool(abs(left - right) > scale * tolerance)


def _symbolic_eq(a: Any, b: Any) -> bool:
    """True if two expressions are equal for all values of their variables."""
    try:
        difference = a - b
        if isinstance(difference, sympy.MatrixBase | sympy.MatrixExpr):
            return bool(sympy.simplify(difference).is_zero_matrix)
        if difference.has(sympy.Float):
            difference = sympy.nsimplify(difference, rational=True)
        if _differ_somewhere(a, b):
            return False
        return _is_zero(difference)
    except _NO_VALUE:
        return False


def _is_zero(difference: Any) -> bool:
    """True if sympy simplifies an expression to 0.

    If necessary, hyperbolic functions are rewritten as exponentials, and factorials and binomial
    coefficients as gamma functions.
    """
    if sympy.simplify(difference).is_zero:
        return True
    if difference.has(sympy.sinh, sympy.cosh, sympy.tanh):
        return bool(sympy.simplify(difference.rewrite(sympy.exp)).is_zero)
    if difference.has(sympy.factorial, sympy.binomial):
        return bool(sympy.gammasimp(difference.rewrite(sympy.gamma)).is_zero)
    return False


def _differ_somewhere(a: Any, b: Any) -> bool:
    """True if two expressions have different values at a test point.

    The test point assigns the positive numbers in `_POINTS` to the variables. False if the values
    cannot be computed.
    """
    names = sorted(a.free_symbols | b.free_symbols, key=str)
    if not names or len(names) > len(_POINTS):
        return False
    values = dict(zip(names, _POINTS, strict=False))
    left = a.subs(values).doit()
    right = b.subs(values).doit()
    if not left.is_number or not right.is_number:
        return False
    if left.has(sympy.Float) or right.has(sympy.Float):
        return False
    return _differ(left, right, FIRST_DIGITS)


def _compare_symbols(a: Any, b: Any) -> bool:
    """True if two expressions consist of the same letters in the same case.

    math-verify calls this function if at least one of the expressions is a symbol.
    """
    return _spelling(a) == _spelling(b)


def _spelling(expression: Any) -> str:
    """Returns the letters of a symbol or a product of symbols, otherwise `str(expression)`."""
    if expression == sympy.E:
        return "e"
    if isinstance(expression, sympy.Symbol):
        return expression.name
    factors = expression.args if isinstance(expression, sympy.Mul) else ()
    if factors and all(x == sympy.E or isinstance(x, sympy.Symbol) for x in factors):
        return "".join(map(_spelling, factors))
    return str(expression)


def _compare_solutions(gold: Any, pred: Any, places: int, precision: int) -> bool:
    """True if two equations or inequalities have the same set of solutions.

    Polynomial equations are equal if their polynomials have the same zeros, including complex
    zeros. For other equations the reference must have a real solution, because math-verify treats
    all equations without real solutions as equal. Other complex relations are not solved, because
    sympy solves inequalities for real variables and omits complex solutions.
    """
    if isinstance(gold, sympy.Eq) and isinstance(pred, sympy.Eq):
        same = _same_polynomials(gold, pred)
        if same is not None:
            return same
        if not _is_complex(gold) and not sympy.solve(gold, gold.free_symbols):
            return False
    if _is_complex(gold) or _is_complex(pred):
        return False
    return _solve_and_compare(gold, pred, places, precision)


def _same_polynomials(gold: Any, pred: Any) -> bool | None:
    """True if two polynomial equations have the same zeros. None if either is not polynomial."""
    numerators = []
    for equation in (gold, pred):
        difference = sympy.nsimplify(equation.lhs - equation.rhs, rational=True)
        numerators.append(sympy.fraction(sympy.together(difference.doit()))[0])
    names = sorted(gold.free_symbols | pred.free_symbols, key=str)
    try:
        polynomials = [sympy.Poly(numerator, *names) for numerator in numerators]
    except sympy.PolynomialError:
        return None
    if any(polynomial.is_ground for polynomial in polynomials):
        return False
    gold_part, pred_part = (polynomial.sqf_part().monic() for polynomial in polynomials)
    return bool((gold_part - pred_part).is_zero)


def _is_complex(part: Any) -> bool:
    """True if a parsed expression contains the imaginary unit or a complex variable."""
    if not isinstance(part, sympy.Basic | sympy.MatrixBase):
        return False
    if part.has(sympy.I):
        return True
    return any(variable.is_complex and not variable.is_real for variable in part.free_symbols)


def _expressions_eq(gold: Any, pred: Any, *args: Any, **options: Any) -> bool:
    """Compares two parsed expressions, with complex variables if either is complex."""
    if _is_complex(gold) or _is_complex(pred):
        gold = _with_complex_variables(gold)
        pred = _with_complex_variables(pred)
    return bool(_math_verify_eq(gold, pred, *args, **options))


def _with_complex_variables(part: Any) -> Any:
    """Replaces the real variables in a parsed expression by complex variables."""
    values = {}
    for variable in getattr(part, "free_symbols", ()):
        if variable.is_real and variable != _IMAGINARY:
            values[variable] = sympy.Symbol(variable.name, complex=True)
    return _substitute(part, values) if values else part


def _without_functions(relation: Any) -> Any:
    """Prepares a relation for its conversion to a set of real numbers, as math-verify does.

    Raises:
      ValueError: if the relation is complex. math-verify catches the exception.
    """
    if _is_complex(relation):
        raise ValueError("a complex relation has no set of real solutions")
    return _unwrap_functions(relation)


_math_verify_eq = verification.sympy_expr_eq
_unwrap_functions = verification.unwrap_fcs
_solve_and_compare = verification.sympy_solve_and_compare
verification.sympy_expr_eq = _expressions_eq
verification.unwrap_fcs = _without_functions
verification.sympy_solve_and_compare = _compare_solutions
verification.sympy_compare_symbols = _compare_symbols
verification.sympy_numeric_eq = _numeric_eq
verification.sympy_symbolic_eq = _symbolic_eq
_convert = partial(parsing.latex2sympy, conversion_config=ConversionConfig(lowercase_symbols=False))


def _latex_to_sympy(text: str, **options: Any) -> Any:
    """Parses LaTeX with real variables, except for i, which is the imaginary unit.

    math-verify would select complex variables for some spellings of an expression, and variables
    with different assumptions are different.
    """
    options["is_real"] = True
    return _with_imaginary_unit(_convert(text, **options))


def _with_imaginary_unit(parsed: Any) -> Any:
    """Replaces the variable i in a parsed expression, but not in a name, as in i = 5.

    The other variables become complex first, because |z - 3i| and |z + 3i| are equal for real z.
    """
    if _IMAGINARY not in getattr(parsed, "free_symbols", ()):
        return parsed
    marked = _substitute(parsed, {_IMAGINARY: _UNIT})
    if _UNIT not in marked.free_symbols:
        return parsed
    return _substitute(_with_complex_variables(marked), {_UNIT: sympy.I})


def _substitute(part: Any, values: dict[Any, Any]) -> Any:
    """Replaces variables in a parsed expression, but not an i that is a side of a relation.

    Relations are not evaluated, because sympy would replace many different ones by `false`.
    """
    if isinstance(part, sympy.Eq) and part.lhs == _IMAGINARY:
        return sympy.Eq(part.lhs, _substitute(part.rhs, values), evaluate=False)
    if isinstance(part, _INEQUALITIES) and _IMAGINARY in part.args:
        sides = [side if side == _IMAGINARY else _substitute(side, values) for side in part.args]
        return part.func(*sides, evaluate=False)
    if isinstance(part, _COMPOUND):
        # Sets and chains of latex2sympy keep their written order in this attribute.
        ordered = getattr(part, "_unsorted_args", part.args)
        members = [_substitute(member, values) for member in ordered]
        return part.func(*members, evaluate=False)
    if part.has(Relational):
        raise ValueError("a relation inside of an expression with i")
    if isinstance(part, sympy.Interval) and part.left_open and part.right_open:
        # A pair such as (i, 2) is parsed as an interval, but the limits of intervals are real.
        return _substitute(sympy.Tuple(part.start, part.end), values)
    return part.subs(values)


parsing.latex2sympy = _latex_to_sympy
# math-verify would remove variables at the end of an expression, such as the t in 5t, and all text
# from the first \text to a closing brace at the end.
normalization.unit_superscript_regex = _UNITS
normalization.units_regex = re.compile(r"(?!)()")
# Without this change, the parser would treat the Greek letters gamma and Gamma as Euler's constant.
for name in ("gamma", "Gamma"):
    letters.sympy_singleton_map.pop(name)
