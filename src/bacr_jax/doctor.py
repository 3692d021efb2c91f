"""`python -m bacr_jax.doctor`: the command of `bacr_doctor`, under the library's name too."""

import sys

from bacr_doctor.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
