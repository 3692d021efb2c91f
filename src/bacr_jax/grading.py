"""Runs the command `bacr grade` if started as `python -m bacr_jax.grading`."""

import sys

from bacr_grading.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
