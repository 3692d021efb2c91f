"""`python -m bacr_jax.plan`: the command of `bacr_plan`, under the library's name too."""

import sys

from bacr_plan.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
