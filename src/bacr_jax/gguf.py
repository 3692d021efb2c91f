"""`python -m bacr_jax.gguf`: the command of `bacr_gguf`, under the library's name too."""

import sys

from bacr_gguf.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
