"""Parses YAML files and command-line overrides into entries (`Entry`).

An entry is the value of one config key. It also contains the dotted name of the key, and the file
and line for error messages.
"""

import difflib
import errno
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bacr_jax import files
from bacr_jax.config import shipped
from bacr_jax.config.synonyms import synonym, whole_synonym
from bacr_jax.config.values import any_of, shown
from bacr_jax.errors import UserError

# Maximum size of a config file in bytes. Configs have a few kilobytes. A larger file is probably
# something else, such as model weights or a data set.
LARGEST_FILE = 1_000_000
# Minimum similarity (the ratio of difflib) at which an unknown key is treated as a typo of an
# existing key. Names with this ratio differ by one or two letters.
_SLIP = 0.8


class _Repeated(Exception):
    """Raised if a mapping contains the same key twice.

    Attributes:
      node: the YAML node of the repeated key.
    """

    def __init__(self, node: yaml.Node):
        self.node = node


class _Loader(yaml.SafeLoader):
    """YAML loader with the number syntax of YAML 1.2, which rejects repeated keys.

    PyYAML implements YAML 1.1, in which `1:30` and `0100` are numbers. Here they are strings.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in names:
                raise _Repeated(key)
            names.add(name)
        return super().construct_mapping(node, deep)


# Pattern and possible first characters of each kind of number.
_NUMBERS = {
    "int": (r"[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(?:(?:0|[1-9][0-9]*)\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
}
_OURS = {f"tag:yaml.org,2002:{kind}" for kind in _NUMBERS}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _OURS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def resolve_numbers(resolver: type[yaml.resolver.BaseResolver]) -> None:
    """Adds the number syntax of config files to a YAML loader or dumper.

    A dumper puts texts such as "0o17" in quotes only if it knows that they are numbers otherwise.
    """
    for kind, (pattern, first) in _NUMBERS.items():
        tag = f"tag:yaml.org,2002:{kind}"
        resolver.add_implicit_resolver(tag, re.compile(rf"(?:{pattern})\Z"), list(first))


resolve_numbers(_Loader)


@dataclass(frozen=True)
class Entry:
    """The value of one key in a config file or an override.

    Attributes:
      key: dotted name of the key.
      value: the value as parsed by YAML.
      text: the value as short printable text, for error messages.
      raw: the value as the user typed it if the value is a scalar without quotes, else None.
      where: file and line, or `command line`.
      lenient: True if a string setting accepts an unquoted number. This is the case for overrides,
        because the shell removes quotes.
    """

    key: str
    value: Any
    text: str
    raw: str | None
    where: str
    lenient: bool


@dataclass(frozen=True)
class Parsed:
    """A parsed YAML document.

    Attributes:
      node: root node of the document, or None if the document is empty.
      loader: the loader that constructs the values of the nodes.
      source: path of the file, or `command line`.
      prefix: for an override, its key followed by a dot. Empty for a file.
    """

    node: yaml.Node | None
    loader: yaml.SafeLoader
    source: str
    prefix: str = ""

    def where(self, node: yaml.Node) -> str:
        """Returns the location of a node: file and line, or `command line` for an override."""
        return self.source if self.prefix else f"{self.source}, line {node.start_mark.line + 1}"


def _document(text: str, source: str, prefix: str = "") -> Parsed:
    """Parses YAML text.

    Raises:
      UserError: if the text is not valid YAML. The message contains the line number for a file.
    """
    try:
        loader = _Loader(text)
        return Parsed(loader.get_single_node(), loader, source, prefix)
    # PyYAML also raises RecursionError for deeply nested input, and ValueError for an escape
    # sequence that is not a valid character.
    except Exception as error:
        problem, line = _problem(error, text)
    if prefix:
        raise UserError(
            f"{source}: {prefix[:-1]}: the YAML is not valid ({problem}); put the value in quotes"
        )
    where = f"{source}, line {line}" if line else source
    raise UserError(f"{where}: the YAML is not valid ({problem}); use lines such as `seed: 0`")


def _problem(error: Exception, text: str) -> tuple[str, int | None]:
    """Returns a description of a parse error, and its 1-based line number or None if unknown."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        return error.problem or error.context or "unreadable", mark.line + 1 if mark else None
    if isinstance(error, yaml.reader.ReaderError):
        return str(error.reason), text.count("\n", 0, error.position) + 1
    if isinstance(error, RecursionError):
        return "nested too deeply", None
    return str(error), None


def parse_file(path: Path) -> Parsed:
    """Parses a YAML file.

    Raises:
      UserError: if the file can't be read, is larger than `LARGEST_FILE`, is not valid UTF-8 or
        YAML, or if its root is not a mapping. An empty file is allowed.
    """
    source = str(path)
    try:
        content = files.read_file(path, most=LARGEST_FILE)
    except FileNotFoundError:
        raise UserError(f"{source}: there is no such file; use {_nearest_file(path)}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if getattr(error, "errno", None) == errno.EFBIG:
            raise UserError(f"{source}: {reason}; use a YAML config") from None
        raise UserError(f"{source}: the file can't be read ({reason}); use a YAML file") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{source}, line {line}: byte {content[error.start]:#04x} is not UTF-8; save the file "
            "as UTF-8 text"
        ) from None
    parsed = _document(text, source)
    if parsed.node is not None and not isinstance(parsed.node, yaml.MappingNode):
        if _is_null(parsed.node):
            return Parsed(None, parsed.loader, source)
        raise UserError(
            f"{parsed.where(parsed.node)}: found {_text(parsed, parsed.node)} instead of keys; "
            "use lines such as `seed: 0`"
        )
    return parsed


def _nearest_file(path: Path) -> str:
    """Suggests a replacement for a missing path, for error messages.

    The replacement is a YAML file with a similar name in the same folder, or else a config that
    ships with the package.
    """
    try:
        files = sorted(p for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml"))
    except OSError:
        files = []
    close = difflib.get_close_matches(path.name, [p.name for p in files], n=1)
    return str(path.parent / close[0]) if close else shipped.instead_of(path)


def parse_override(override: str) -> Parsed:
    """Parses a command-line override of the form `a.b=value`, with the value in YAML."""
    key, equals, value = override.partition("=")
    if not (equals and key.strip()):
        raise UserError(
            f"command line: {shown(override)} is not an override of a config key; use key=value, "
            "such as seed=1"
        )
    return _document(value, "command line", f"{key.strip()}.")


def _is_null(node: yaml.Node) -> bool:
    return node.tag == "tag:yaml.org,2002:null"


def constructed(parsed: Parsed) -> Any:
    """Returns the content of a document as a Python value, or None if the document is empty."""
    return parsed.node and _value(parsed, parsed.node, parsed.source, parsed.prefix[:-1])


def _value(parsed: Parsed, node: yaml.Node, where: str, key: str) -> Any:
    """Constructs the Python value of a node.

    Args:
      parsed: the document that contains the node.
      node: the node.
      where: location for error messages.
      key: dotted key for error messages. It may be empty.
    """
    name = f": {shown(key, quote=False)}" if key else ""
    try:
        return parsed.loader.construct_object(node, deep=True)
    except _Repeated as repeated:
        where = parsed.where(repeated.node)
        word = shown(str(repeated.node.value))
        raise UserError(f"{where}{name}: found {word} twice; keep only one of them") from None
    # PyYAML does not wrap the exceptions of its conversions. They occur for a tag that does not
    # match the text (`!!int x`), an invalid date, or a number with thousands of digits.
    except Exception:
        line = f"{where}{name}: the value is not valid YAML; put it in quotes, or use another value"
        raise UserError(line) from None


def _text(parsed: Parsed, node: yaml.Node) -> str:
    """Formats the value of a node as short text, for error messages."""
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return shown(_value(parsed, node, parsed.where(node), "list"))
    if _is_null(node):
        return "nothing" if not node.value else shown(node.value, quote=False)
    quoted = node.tag == "tag:yaml.org,2002:str"
    return shown(node.value) if quoted else shown(node.value, quote=False)


def entries(parsed: Parsed, sections: set[str]) -> Iterator[Entry]:
    """Yields an entry for each value of a document, in document order.

    Nested and dotted keys are equivalent: `{a: {b: 1}}` yields the same entry as `{a.b: 1}`. An
    empty section yields no entries.

    Args:
      parsed: the document.
      sections: dotted names of all sections.

    Raises:
      UserError: if a key is repeated or is not a name, or if a value can't be constructed.
    """
    if parsed.prefix:
        # The document of an override is the value of a single key. An empty value means null.
        node = parsed.node or yaml.ScalarNode("tag:yaml.org,2002:null", "")
        yield from _under(parsed, parsed.prefix[:-1], node, 0, sections, {})
    elif parsed.node is not None:
        yield from _under(parsed, "", parsed.node, 0, sections, {})


def _under(
    parsed: Parsed,
    key: str,
    node: yaml.Node,
    line: int,
    sections: set[str],
    first_lines: dict[str, int],
) -> Iterator[Entry]:
    """Yields the entries of a node and its children.

    Args:
      parsed: the document.
      key: dotted key of the node. Empty for the root of a file.
      node: the node.
      line: 1-based line number of the key, or 0 for the root of a file and for an override.
      sections: dotted names of all sections.
      first_lines: line number of every key seen so far, to report repeated keys. Updated in place.
    """
    # Recurses only into known sections. This guarantees termination for a mapping that contains
    # itself through an alias.
    inside = not key or key in sections
    if inside and isinstance(node, yaml.MappingNode):
        for name_node, child in node.value:
            # The nodes of an alias have the line numbers of the mapping to which the alias refers.
            # Report the line of the alias for these keys.
            key_line = max(name_node.start_mark.line + 1, line)
            where = _location(parsed, key_line)
            name = name_node.value if isinstance(name_node, yaml.ScalarNode) else None
            if not name:
                bad_key = "an empty key" if name == "" else "a list or mapping as a key"
                raise UserError(f"{where}: found {bad_key}; use the name of a config key")
            dotted = f"{key}.{name}" if key else name
            if dotted in first_lines:
                first = _location(parsed, first_lines[dotted]).rpartition(", ")[2]
                name = shown(dotted, quote=False)
                raise UserError(f"{where}: {name} is already set in {first}; keep only one of them")
            first_lines[dotted] = key_line
            yield from _under(parsed, dotted, child, key_line, sections, first_lines)
    elif parsed.prefix or not (inside and _is_null(node)):
        plain = isinstance(node, yaml.ScalarNode) and node.style is None
        where = _location(parsed, line)
        yield Entry(
            key=key,
            value=_value(parsed, node, where, key),
            text=_text(parsed, node),
            raw=node.value if plain else None,
            where=where,
            lenient=plain and bool(parsed.prefix),
        )


def _location(parsed: Parsed, line: int) -> str:
    """Returns the location of a key: file and line, or `command line` for an override."""
    return parsed.source if parsed.prefix else f"{parsed.source}, line {line}"


def nearest_key(key: str, names: Mapping[str, bool]) -> str:
    """Suggests what to write instead of an unknown key, for error messages.

    Returns the first of these suggestions that is available:

    1. The key to use instead of the whole name, if other trainers have this name.
    2. A key or subsection of the same section that is probably meant, up to a typo. It is left out
       if other trainers have a key with this name, which is then no typo.
    3. The settings of other sections whose last name is the same, and the key for which other
       trainers use this name.
    4. A less similar key of the same section.
    5. The list of all keys of the section.
    6. If the section does not exist, the most similar setting of any section.

    Args:
      key: the unknown dotted key.
      names: maps every dotted name to True for a section and False for a setting.
    """
    whole_name = whole_synonym(key)
    if whole_name is not None:
        return whole_name
    parent, _, last = key.rpartition(".")
    other_name = synonym(key)
    siblings = {
        name.rpartition(".")[2]: name for name in names if name.rpartition(".")[0] == parent
    }
    typing_errors = difflib.get_close_matches(last, siblings, n=1, cutoff=_SLIP)
    if typing_errors and other_name is None:
        return siblings[typing_errors[0]]
    settings = [name for name, is_section in names.items() if not is_section]
    same = [name for name in settings if name.rpartition(".")[2] == last]
    if other_name is not None:
        # The synonym may already name a setting with the same last name.
        same = [*(name for name in same if name not in other_name), other_name]
    if same:
        return any_of(same)
    similar = difflib.get_close_matches(last, siblings, n=1)
    if similar:
        return siblings[similar[0]]
    if siblings:
        return f"one of {', '.join(siblings.values())}"
    return (difflib.get_close_matches(key, settings, n=1) or ["a key that bacr keys lists"])[0]
