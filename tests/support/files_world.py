"""Disks on which nothing can be written."""

import errno
import os


def full_disk(monkeypatch):
    """From here on no file reaches the disk."""

    def fail(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
