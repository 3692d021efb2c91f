#!/usr/bin/env python3
"""Measures how much of the code depends on the config: functions that take it, and a reader's walk.

    .ci/walks.py             print the counts
    .ci/walks.py --list      also print the functions, and the files of the walk in order

Functions that take the config: functions and methods of src with a parameter whose annotation names
`Config`, the whole config. Sections such as `DataConfig` and settings of subpackages do not count.

The walk of the config simulates a reader who starts at `bacr_jax.train.main`. The reader reads each
function from top to bottom. If the function names another function of src that takes or returns a
`Config` or one of its sections, the reader enters that function before reading on. Each function is
entered only once. A class is entered at its `__init__`, which leads to the methods of the class
that it names. A *file* of the walk is a file with a function that was entered. A *return* is an
entry into a file that the walk had entered before and left since.

Standard library only.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START = ("bacr_jax.train", "main")
WHOLE = frozenset({"Config"})
# Modules that define the sections, classes whose names end with `Config`.
SCHEMA = ("bacr_jax.config.schema", "bacr_jax.config.method_settings")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Module:
    """The names that a module defines or imports.

    Attributes:
      functions: functions, and methods as `Class.method`.
      classes: names of the classes.
      imports: full names of modules and of their members, keyed by the name used here.
    """

    functions: dict[str, Function] = field(default_factory=dict)
    classes: set[str] = field(default_factory=set)
    imports: dict[str, str] = field(default_factory=dict)


@dataclass
class Walk:
    """The functions that the reader entered, and the files in the order of entry.

    Attributes:
      functions: (module, function) of every function that was entered.
      files: modules in the order of their first entry.
      returns: number of entries into modules that had been entered before and left since.
    """

    functions: list[tuple[str, str]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    returns: int = 0


def read_modules(source: Path) -> dict[str, Module]:
    """Parses all modules below a folder, keyed by full name."""
    modules = {}
    for path in sorted(source.rglob("*.py")):
        name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        module = Module()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, Function):
                module.functions[node.name] = node
            elif isinstance(node, ast.ClassDef):
                module.classes.add(node.name)
                for member in node.body:
                    if isinstance(member, Function):
                        module.functions[f"{node.name}.{member.name}"] = member
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    module.imports[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    module.imports[alias.asname or alias.name] = alias.name
        modules[name] = module
    return modules


def mentions(annotation: ast.expr | None, classes: frozenset[str]) -> bool:
    """True if an annotation contains the name of a class, also inside a quoted annotation."""
    if annotation is None:
        return False
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name) and node.id in classes:
            return True
        if isinstance(node, ast.Attribute) and node.attr in classes:
            return True
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                quoted = ast.parse(node.value, mode="eval").body
            except SyntaxError:
                continue
            if mentions(quoted, classes):
                return True
    return False


def takes(function: Function, classes: frozenset[str]) -> bool:
    """True if the annotation of a parameter contains the name of a class."""
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return any(mentions(parameter.annotation, classes) for parameter in parameters)


def functions_with_config(modules: dict[str, Module]) -> list[tuple[str, str]]:
    """Returns (module, function) of every function that takes the whole config."""
    return [
        (name, function)
        for name, module in modules.items()
        for function, node in module.functions.items()
        if takes(node, WHOLE)
    ]


def resolve(modules: dict[str, Module], module: str, name: str) -> tuple[str, str] | None:
    """Returns (module, function) for a name as used in a module, following re-exports.

    A class is resolved to its `__init__`. Returns None for any other name.
    """
    if module not in modules:
        return None
    first, _, rest = name.partition(".")
    members = modules[module]
    if name in members.functions:
        return module, name
    if name in members.classes and f"{name}.__init__" in members.functions:
        return module, f"{name}.__init__"
    if first not in members.imports:
        return None
    target = members.imports[first]
    if target in modules:
        return resolve(modules, target, rest) if rest else None
    owner, _, member = target.rpartition(".")
    return resolve(modules, owner, f"{member}.{rest}" if rest else member)


def names_in(node: ast.AST) -> Iterator[str]:
    """Yields the dotted names that a piece of code reads, in the order of the source."""
    if isinstance(node, ast.Attribute):
        parts = [node.attr]
        value = node.value
        while isinstance(value, ast.Attribute):
            parts.append(value.attr)
            value = value.value
        if isinstance(value, ast.Name):
            yield ".".join([value.id, *reversed(parts)])
            return
    if isinstance(node, ast.Name):
        yield node.id
        return
    for child in ast.iter_child_nodes(node):
        yield from names_in(child)


def walk(modules: dict[str, Module], start: tuple[str, str] = START) -> Walk:
    """Walks the functions that pass the config on, as the module docstring describes."""
    result = Walk()
    current = ""
    sections = {name for module in SCHEMA for name in modules[module].classes}
    classes = WHOLE | {name for name in sections if name.endswith("Config")}

    def enter(module: str, name: str) -> None:
        nonlocal current
        result.functions.append((module, name))
        if module != current:
            if module in result.files:
                result.returns += 1
            else:
                result.files.append(module)
            current = module
        owner = name.rpartition(".")[0]
        for statement in modules[module].functions[name].body:
            for used in names_in(statement):
                if owner and used.startswith("self."):
                    used = used.replace("self", owner, 1)
                target = resolve(modules, module, used)
                if target is None or target in result.functions:
                    continue
                node = modules[target[0]].functions[target[1]]
                is_own_method = owner != "" and target[1].startswith(f"{owner}.")
                if takes(node, classes) or mentions(node.returns, classes) or is_own_method:
                    enter(*target)

    enter(*start)
    return result


def main() -> int:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="also print functions and files")
    listed = parser.parse_args().list
    modules = read_modules(ROOT / "src")
    functions = functions_with_config(modules)
    walked = walk(modules)
    print(f"{len(functions)} functions take Config")
    print(f"{len(walked.files)} files and {walked.returns} returns on the walk of the config")
    if listed:
        print("\nfunctions that take Config:")
        print("\n".join(f"  {module}.{name}" for module, name in functions))
        print("\nfiles of the walk, in order:")
        print("\n".join(f"  {module}" for module in walked.files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
