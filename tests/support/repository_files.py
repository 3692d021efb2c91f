"""Which files the repository has, to see that the tests leave all of them as they were."""

import fnmatch
import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def repository_files(root=ROOT):
    """Returns size and time of change of each file under `root`, except what git ignores.

    Ignored folders are left out because a training that runs at the same time writes to `runs/`.
    """
    patterns = [".git", *(root / ".gitignore").read_text().split()]
    files = {}
    for folder, folder_names, file_names in os.walk(root):
        here = Path(folder).relative_to(root)
        folder_names[:] = [name for name in folder_names if not is_ignored(here / name, patterns)]
        for name in file_names:
            path = here / name
            if not is_ignored(path, patterns):
                status = (root / path).lstat()
                files[path.as_posix()] = (status.st_size, status.st_mtime_ns)
    return files


def is_ignored(path, patterns):
    """True if a pattern of .gitignore names the path: with a leading slash only at the top."""
    for pattern in patterns:
        compared = f"/{path.as_posix()}" if pattern.startswith("/") else path.name
        if fnmatch.fnmatchcase(compared, pattern.rstrip("/")):
            return True
    return False


def changed_files(before, after):
    """Returns the sorted paths of new, removed and changed files."""
    paths = before.keys() | after.keys()
    return sorted(path for path in paths if before.get(path) != after.get(path))
