"""`python docs/make_configuration.py`: docs/configuration.md from the schema, or a --check."""

import sys
from pathlib import Path

from bacr_jax.config.fields import Key, range_text
from bacr_jax.config.io import schema
from bacr_jax.config.values import describe, written
from bacr_jax.runs.agreement import FREE

sys.path.append(str(Path(__file__).parent))

from made_page import write_or_check  # noqa: E402 - docs is not a package

PAGE = Path(__file__).with_name("configuration.md")
COMMAND = "python docs/make_configuration.py"
HEAD = f"""\
# Configuration: every key

Made by `{COMMAND}` from `src/bacr_jax/config/schema.py`; edit the schema, not this
page. For a terminal, `bacr keys` prints the same list,
`bacr keys budget` one section, and `bacr keys budget.max` one key.

A config is a YAML file with these sections; several files may be given, and later ones win
(`--config A --config B`). On the command line a key is written `section.key=value`, with the value
in YAML. What is not a key, not of its type, outside its range or at odds with another key is
refused in one line, which says what to write instead.

The last column is for a run of several processes (`docs/devices.md`): a key in which they differ is
refused before they train, or is free, since it names a place on each machine's own disk: what lies
there is compared instead, or is a cache.
"""
COLUMNS = (
    "| key | default | what can be written | meaning | processes differ |\n"
    "| --- | --- | --- | --- | --- |"
)


def cell(text: str) -> str:
    """Text that stays in its cell."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def code(text: str) -> str:
    """Text as it would be written in a file."""
    return f"`{text}`".replace("|", "\\|") if text else '`""`'


def row(name: str, key: Key) -> str:
    """A key's line of the table."""
    possible = ", ".join([describe(key.hint), *map(range_text, filter(None, [key.bounds]))])
    cells = [code(name), code(written(key.value)), cell(possible), cell(key.meaning)]
    cells.append("free" if name in FREE else "refused")
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """The whole page: keys outside any section, then section by section."""
    settings = {name: key for name, key in schema().items() if not key.is_section}
    parts = [HEAD]
    for title in ("", *(name for name, key in schema().items() if key.is_section)):
        inside = [row(n, key) for n, key in settings.items() if n.rpartition(".")[0] == title]
        heading = f"## {title}\n\n{cell(schema()[title].meaning)}" if title else "## At the top"
        parts.append("\n".join([f"{heading}\n", COLUMNS, *inside]) + "\n")
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    """Writes the page, or checks it. Returns the exit code."""
    complaint = f"docs/configuration.md differs from the schema; run {COMMAND}"
    return write_or_check(arguments, PAGE, page(), complaint)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
