r"""Compares two answers by computer algebra. Runs in worker processes only.

math-verify parses both answers and chooses the parts to compare. This module replaces four of its
comparisons, because they accept different values: numbers that differ by less than 1e-16, letters
of different case, equations without real solutions, and `I` as the imaginary unit.
"""

import re
from functools import lru_cache, partial
from typing import Any

import math_verify.grader as verification
import math_verify.parser as parsing
import sympy
from latex2sympy2_extended import symbols as letters
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import LatexExtractionConfig, parse, verify

# Decimals agree to this many places (docs/grading.md, rule 2).
PLACES = 6
# Digits of the first comparison of two constants.
FIRST_DIGITS = 40
# Digits of the comparison that decides if simplification does not.
LAST_DIGITS = 500
# Values of the variables at which two expressions are compared before they are simplified.
_POINTS = tuple(sympy.Rational(n, 7) for n in (11, 17, 23, 31, 41, 47, 59, 61, 67, 73))

_WORDS = r"\\(?:text[a-z]*|mbox|operatorname|mathrm)\s*\{[^{}]*\}|\\[A-Za-z]+"
_CURRENT = re.compile(rf"({_WORDS})|(?<!_)(\^?)I")
_TRANSPOSED = re.compile(r"\^\s*(?:T|\{\s*T\s*\}|\{?\s*\\(?:top|intercal)\s*\}?)")
_PRIMES = re.compile(r"(?<!\d)'+")


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
      prose: the answer is running text, in which math-verify searches a value.
      reference_is_prose: the reference is running text.
      search: a value somewhere in the answer counts too, and not only the whole answer.
      places: decimal places to which decimals must agree.

    Returns:
      A dict with the verdict `correct`; with `whole`, True if the whole answer was understood and
      is right; and with `found`, the part of running text that was compared.
    """
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
    # The last text in math-verify's result is the text that it parsed.
    compared_text = next((part for part in reversed(target) if isinstance(part, str)), "")
    return {"correct": correct, "found": compared_text[:2000]}


def warm_up() -> None:
    """Builds the parser's tables, so that this time does not count for the first request."""
    for sample in ("\\frac{1}{2}", "x^2 + \\sqrt{3}", "(1, 2)"):
        compare(sample, "1")


def _is_plain_equation(part: Any) -> bool:
    """True if a parsed reference is a relation without variables, which equals any other."""
    return getattr(part, "is_Relational", False) and not part.free_symbols


@lru_cache(maxsize=256)
def _parse_whole(text: str) -> list[Any]:
    """Parses a text; returns an empty list if only a part of it can be parsed."""
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
    """Rewrites signs that the parser drops or misreads.

    The parser drops primes and the exponent T, and reads the letter I as the imaginary unit. A
    prime behind a digit means feet and stays.
    """
    text = _PRIMES.sub(_exponent_of_primes, text)
    text = _TRANSPOSED.sub(r"^{\\mathcal{T}}", text)
    return _CURRENT.sub(_letter, text) if "I" in text else text


def _exponent_of_primes(run: re.Match[str]) -> str:
    return "^{" + r"\prime" * len(run[0]) + "}"


def _letter(match: re.Match[str]) -> str:
    if match[1]:
        return match[1]
    return r"^{\mathcal{I}}" if match[2] else r"\mathcal{I}"


# --- replacements of math-verify's comparisons ----------------------------------------------------


# Errors of sympy for an expression without a value or truth value.
_NO_VALUE = (ArithmeticError, AttributeError, NotImplementedError, TypeError, ValueError)


def _numeric_eq(a: Any, b: Any, places: int, precision: int) -> bool:
    """True if two constants, or two matrices of constants, have the same value."""
    try:
        return _same_value(a, b, places)
    except _NO_VALUE:
        return False


def _same_value(a: Any, b: Any, places: int) -> bool:
    """True if two constants or matrices agree; can raise any error of `_NO_VALUE`."""
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
    """True if two matrices have the same shape and equal cells."""
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
    """True if two numbers agree after rounding to `places`, and within 0.1 % for six places."""
    if a.round(places) != b.round(places):
        return False
    if places < PLACES:
        return True
    error = abs(a - b).evalf(FIRST_DIGITS)
    return bool(1000 * error <= abs(b).evalf(FIRST_DIGITS))


def _same_constant(a: Any, b: Any) -> bool:
    """True if two constants without decimals are the same number."""
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
    """True if two constants differ in three quarters of their first `digits` digits."""
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
    """True if sympy simplifies an expression to 0, if necessary by exponentials or gammas."""
    if sympy.simplify(difference).is_zero:
        return True
    if difference.has(sympy.sinh, sympy.cosh, sympy.tanh):
        return bool(sympy.simplify(difference.rewrite(sympy.exp)).is_zero)
    if difference.has(sympy.factorial, sympy.binomial):
        return bool(sympy.gammasimp(difference.rewrite(sympy.gamma)).is_zero)
    return False


def _differ_somewhere(a: Any, b: Any) -> bool:
    """True if two expressions have different values where all variables are positive."""
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
    """True if two expressions, of which one is a symbol, are the same letters in the same case."""
    return _spelling(a) == _spelling(b)


def _spelling(expression: Any) -> str:
    """Returns the letters of a symbol or a product of symbols, else the expression as text."""
    if expression == sympy.E:
        return "e"
    if isinstance(expression, sympy.Symbol):
        return expression.name
    factors = expression.args if isinstance(expression, sympy.Mul) else ()
    if factors and all(x == sympy.E or isinstance(x, sympy.Symbol) for x in factors):
        return "".join(map(_spelling, factors))
    return str(expression)


def _compare_solutions(gold: Any, pred: Any, places: int, precision: int) -> bool:
    """True if two equations or inequalities have the same solutions.

    Equations of polynomials are compared by their polynomials, with complex solutions. Other
    equations must have a real solution, because all equations without one have the same solutions.
    """
    if isinstance(gold, sympy.Eq) and isinstance(pred, sympy.Eq):
        same = _same_polynomials(gold, pred)
        if same is not None:
            return same
        if not sympy.solve(gold, gold.free_symbols):
            return False
    return _solve_and_compare(gold, pred, places, precision)


def _same_polynomials(gold: Any, pred: Any) -> bool | None:
    """True if two equations of polynomials have the same zeros; None for other equations."""
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


_solve_and_compare = verification.sympy_solve_and_compare
verification.sympy_solve_and_compare = _compare_solutions
verification.sympy_compare_symbols = _compare_symbols
verification.sympy_numeric_eq = _numeric_eq
verification.sympy_symbolic_eq = _symbolic_eq
parsing.latex2sympy = partial(
    parsing.latex2sympy, conversion_config=ConversionConfig(lowercase_symbols=False)
)
# The parser would read both letters as Euler's constant.
for name in ("gamma", "Gamma"):
    letters.sympy_singleton_map.pop(name)
