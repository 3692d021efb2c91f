"""The commit of this package."""

import shutil
import subprocess
from pathlib import Path


def commit() -> str:
    """The commit of this package, if it runs from a clone; empty otherwise."""
    git = shutil.which("git")
    if git is None:
        return ""
    command = [git, "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else ""
