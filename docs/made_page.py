"""Writes a page that a script makes, or checks that it is up to date.

Called by docs/make_configuration.py and docs/make_performance.py.
"""

import sys
from collections.abc import Sequence
from pathlib import Path


def write_or_check(arguments: Sequence[str], page: Path, content: str, complaint: str) -> int:
    """Writes a page, or with `--check` compares it with its new content.

    Args:
      arguments: command line of the script.
      page: path of the page.
      content: text that the script made.
      complaint: printed on standard error if the page is not up to date.

    Returns:
      Exit code: 1 if `--check` finds another text in the page, otherwise 0.
    """
    if "--check" not in arguments:
        page.write_text(content, encoding="utf-8")
        return 0
    if page.read_text(encoding="utf-8") == content:
        return 0
    print(complaint, file=sys.stderr)
    return 1
