"""Speeds up Triton's CPU interpreter in tests without a GPU, which have this on PYTHONPATH."""

import contextlib
import os

if os.environ.get("TRITON_INTERPRET") == "1":
    # Tests also start Python of another environment, in which Triton is not installed.
    with contextlib.suppress(ImportError):
        import interpreted_kernels  # noqa: F401
