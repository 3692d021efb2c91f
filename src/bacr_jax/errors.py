"""The exception for invalid input, and helpers for one-line error messages and warnings.

All names are re-exported from `bacr_io.errors`, so that every package raises the same class.
"""

from bacr_io.errors import UserError, attempt, faults_of, first_of, printable, reason_of

__all__ = ["UserError", "attempt", "faults_of", "first_of", "printable", "reason_of"]
