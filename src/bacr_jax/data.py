"""`python -m bacr_jax.data`: the command of the room `questions`, under the name of its keys."""

import sys

from bacr_jax.questions.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
