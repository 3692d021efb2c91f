"""Runs `bacr import` as `python -m bacr_jax.gguf`, for scripts that use this spelling."""

import sys

from bacr_gguf.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
