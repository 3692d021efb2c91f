"""Runs the command `bacr data` if started as `python -m bacr_jax.data`."""

import sys

from bacr_jax.questions.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
