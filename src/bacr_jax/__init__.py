"""Budget-adaptive curriculum reasoning for language models, in JAX."""

import os

# transformers is used for tokenizers and folders only; its advice to install PyTorch is noise here.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

__version__ = "0.1.0"
