"""Runs the command `bacr plan` if started as `python -m bacr_jax.plan`."""

import sys

from bacr_plan.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
