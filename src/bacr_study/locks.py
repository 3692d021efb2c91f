"""Locks that are waited for: what processes of a study share is made by one at a time."""

import fcntl
import sys
import time
from pathlib import Path
from typing import TextIO

# Seconds between looks at a lock that another process holds.
_LOOK_AGAIN = 0.5


def lock_when_free(path: Path) -> TextIO:
    """Takes the lock of a file, once no other process holds it; closing the file frees it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock, said = path.open("a"), False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if not said:
                print(f"waiting for the process that holds {path}", file=sys.stderr, flush=True)
            said = True
            time.sleep(_LOOK_AGAIN)
