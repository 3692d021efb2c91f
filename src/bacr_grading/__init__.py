"""Grades model outputs: fast rules first, math-verify in killable processes for the rest.

This package imports neither JAX nor `bacr_jax`, and no computer algebra system in the calling
process. docs/grading.md has the rules. The names below are imported at their first use, because
other packages need only the file readers and errors here and should not wait for the graders.
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
    """Imports a public name at its first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
