"""`python -m bacr_jax.study`: the command of `bacr_study`, under the library's name too."""

import sys

from bacr_study.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
