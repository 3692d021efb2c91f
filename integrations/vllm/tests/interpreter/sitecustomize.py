"""On PYTHONPATH of tests without a GPU: Triton's kernels run in its interpreter, for a CPU."""

import contextlib
import os

if os.environ.get("TRITON_INTERPRET") == "1":
    # Python of another environment can be started from here, which has no Triton.
    with contextlib.suppress(ImportError):
        import interpreted_kernels  # noqa: F401
