"""Grading of model outputs: fast rules first, math-verify in killable processes for the rest.

Imports neither JAX nor a computer algebra system. The rules are written down in docs/grading.md.
"""

from bacr_jax.grading.grader import ExactGrader, Grader
from bacr_jax.grading.judge import LENIENT, STRICT, Reference, Verdict, parse_reference
from bacr_jax.grading.verifier import Verifier, VerifierGrader, load_verifier

__all__ = [
    "LENIENT",
    "STRICT",
    "ExactGrader",
    "Grader",
    "Reference",
    "Verdict",
    "Verifier",
    "VerifierGrader",
    "load_verifier",
    "parse_reference",
]
