"""Runs `bacr grade` as `python -m bacr_jax.grading`, for scripts that use this spelling."""

import sys

from bacr_grading.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
