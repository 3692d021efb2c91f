"""Lists the files of the repository, so that a test session can verify that none has changed."""

import fnmatch
import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def repository_files(root=ROOT):
    """Returns (size, modification time in ns) of each file under `root` that git does not ignore.

    Ignored folders are left out, because a training run may write to `runs/` at the same time.
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
    """True if a pattern of .gitignore matches the path.

    Args:
      path: path relative to the repository.
      patterns: patterns of .gitignore. A pattern with a leading slash only matches at the top of
        the repository. Other patterns match the last part of a path.
    """
    for pattern in patterns:
        compared = f"/{path.as_posix()}" if pattern.startswith("/") else path.name
        if fnmatch.fnmatchcase(compared, pattern.rstrip("/")):
            return True
    return False


def changed_files(before, after):
    """Returns the sorted paths of new, removed and changed files."""
    paths = before.keys() | after.keys()
    return sorted(path for path in paths if before.get(path) != after.get(path))
