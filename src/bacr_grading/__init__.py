"""Grades model outputs by fast rules, and by math-verify in killable processes if necessary.

This package imports neither JAX nor `bacr_jax`, and the calling process does not import a computer
algebra system. The rules are documented in docs/grading.md. The public names are imported lazily,
because a worker process only needs one module of this package.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bacr_grading.grader import ExactGrader, Grader
    from bacr_grading.judge import LENIENT, STRICT, Reference, Verdict, parse_reference
    from bacr_grading.verifier import Verifier, VerifierGrader, load_verifier

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

_MODULES = {
    "grader": ("ExactGrader", "Grader"),
    "judge": ("LENIENT", "STRICT", "Reference", "Verdict", "parse_reference"),
    "verifier": ("Verifier", "VerifierGrader", "load_verifier"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports a public name on first access."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
