"""Runs the command `bacr doctor` if started as `python -m bacr_jax.doctor`."""

import sys

from bacr_doctor.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
