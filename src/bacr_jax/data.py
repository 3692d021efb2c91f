"""Runs `bacr data` as `python -m bacr_jax.data`, for scripts that use this spelling."""

import sys

from bacr_jax.questions.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
