"""Runs the command `bacr study` if started as `python -m bacr_jax.study`."""

import sys

from bacr_study.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
