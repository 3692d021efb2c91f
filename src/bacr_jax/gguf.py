"""Runs the command `bacr import` if started as `python -m bacr_jax.gguf`."""

import sys

from bacr_gguf.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
