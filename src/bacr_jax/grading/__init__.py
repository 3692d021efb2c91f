"""Grading of model outputs: fast rules first, math-verify in killable processes for the rest.

Imports neither JAX nor a computer algebra system. The rules are written down in docs/grading.md.
"""

from bacr_jax.grading.exact import ExactGrader
from bacr_jax.grading.gold import ParsedGold, parse_gold
from bacr_jax.grading.grader import Grader, Pending
from bacr_jax.grading.verdict import LENIENT, STRICT, Verdict

__all__ = [
    "LENIENT",
    "STRICT",
    "ExactGrader",
    "Grader",
    "ParsedGold",
    "Pending",
    "Verdict",
    "parse_gold",
]
