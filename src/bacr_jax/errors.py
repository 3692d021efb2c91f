"""The exception that means: this input can not be used, and here is what to write instead.

The class is that of the grader, which needs it where there is no library: commands catch one.
"""

from bacr_grading.errors import UserError, faults_of, printable

__all__ = ["UserError", "faults_of", "printable"]
