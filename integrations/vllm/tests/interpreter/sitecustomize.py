"""On PYTHONPATH of tests without a GPU: Triton's kernels run in its interpreter, for a CPU."""

import contextlib
import os

if os.environ.get("TRITON_INTERPRET") == "1":
    # Python of another environment can be started from here, which has no Triton.
    with contextlib.suppress(ImportError):
        from triton import backends

        class Driver:
            """The one that is there."""

            @staticmethod
            def is_active():
                """As Triton asks it."""
                return True

        backends.backends["cpu"] = backends.Backend(compiler=None, driver=Driver)
