"""Simulates a full disk."""

import errno
import os


def full_disk(monkeypatch):
    """Makes `os.fsync` fail as on a full disk, until the end of the test."""

    def fail(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
