"""Runs `bacr doctor` as `python -m bacr_jax.doctor`, for scripts that use this spelling."""

import sys

from bacr_doctor.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
