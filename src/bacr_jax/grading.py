"""`python -m bacr_jax.grading`: the command of `bacr_grading`, under the library's name too."""

import sys

from bacr_grading.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
