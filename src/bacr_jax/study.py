"""Runs `bacr study` as `python -m bacr_jax.study`, for scripts that use this spelling."""

import sys

from bacr_study.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
