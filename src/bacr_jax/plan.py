"""Runs `bacr plan` as `python -m bacr_jax.plan`, for scripts that use this spelling."""

import sys

from bacr_plan.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
