"""Lists the reasoning-gym generators whose scorers were reviewed for safety.

A scorer compares an answer with an item. The scorers of nine of these generators evaluate an answer
as code, and `gym_safe` replaces them. The others do not evaluate answers as code. The list contains
a digest of all source files that a scorer could call. If such a file has changed, `gym` rejects the
generator, because the new version was not reviewed. `python -m bacr_tasks.gym_checked` prints the
list for the installed version. Review the changed files before you copy a line into this file.
"""

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

# Version of reasoning-gym that was reviewed.
VERSION = "0.1.25"
_PACKAGE = "reasoning_gym"
# Submodules that no scorer calls.
_WITHOUT_SCORERS = ("coaching", "factory", "composite", "version_manager")
# Module of the base class of all data sets, which is included in every digest.
_BASE = "reasoning_gym.dataset"
# Number of hexadecimal digits in a digest.
_DIGITS = 16
# Digest of all source files that a generator's scorer could call, by the name of the generator.
CHECKED = {
    "ab": "a4a5054816e75275",
    "acre": "5acc99b279e962ec",
    "advanced_geometry": "327876740e6bb2d3",
    "aiw": "26662cc190252ad4",
    "arc_1d": "ee0c080182b0e9ac",
    "arc_agi": "7a03ddf200297592",
    "base_conversion": "a132d5843528118d",
    "basic_arithmetic": "31997d68cf6f71f0",
    "bf": "9b4ead2c49ea6fd3",
    "binary_alternation": "c29840338c4fb6dc",
    "binary_matrix": "c6faa783cde69b77",
    "bitwise_arithmetic": "5a4f6c672ff36507",
    "boxnet": "2c921c2cfd7aa92e",
    "caesar_cipher": "97cbf45cb5de5f30",
    "calendar_arithmetic": "831e168a32fa5fea",
    "chain_sum": "2f8d7b77b5474122",
    "circuit_logic": "267677898b44ca14",
    "codeio": "53d48a83cee2ba9e",
    "coin_flip": "830caf20cbf0b186",
    "color_cube_rotation": "77d0ec503a9e7e15",
    "complex_arithmetic": "de22a053f81699ea",
    "count_bits": "90b384767e98cdcd",
    "count_primes": "8c789f7ceb39a89a",
    "countdown": "54eef83bceb19a50",
    "course_schedule": "29012600c4d8c512",
    "cryptarithm": "78836c0e95031737",
    "decimal_arithmetic": "d8f3ce731b693f29",
    "decimal_chain_sum": "d79143a794ad6f6c",
    "dice": "c32eea9135953e0c",
    "emoji_mystery": "cd981ca092044c0b",
    "family_relationships": "5d5258953ea1a6b5",
    "figlet_font": "11cb2aff39ca39fc",
    "fraction_simplification": "c8d78ec97242025c",
    "futoshiki": "72fbc237df93e6d0",
    "game_of_life": "4dd4d1099fb25507",
    "game_of_life_halting": "532491e6b7d3f476",
    "gcd": "695f90eeeed89fd4",
    "graph_color": "d6948d469644e5dc",
    "group_anagrams": "cd2e581699dd1e5b",
    "gsm_symbolic": "06e25ec284ce68e4",
    "intermediate_integration": "f86389a4a1ce74f5",
    "isomorphic_strings": "5ca7c55ff88af126",
    "jugs": "b2a9e7daf784b4f9",
    "kakurasu": "a577b2e62a3cb8ea",
    "knight_swap": "c58fd4940c387a96",
    "knights_knaves": "97f5140967546850",
    "largest_island": "750094f02aa7e26b",
    "lcm": "97c2151ea35428a7",
    "leg_counting": "6d07ed0ae5827a43",
    "letter_counting": "cb0394d5c2df9596",
    "letter_jumble": "d85bcb8a1288440f",
    "list_functions": "018882942afff71e",
    "mahjong_puzzle": "baff5a768bb2e2a9",
    "manipulate_matrix": "864591ecb9640be3",
    "maze": "17ed9631db68e88d",
    "mini_sudoku": "d0de61ede12259b2",
    "modulo_grid": "d79312889583ff36",
    "n_queens": "228f335e69af3eaf",
    "needle_haystack": "2de032b9cf579286",
    "number_filtering": "c5e859d71e7fa263",
    "number_format": "951780a1fda9bf37",
    "number_sequence": "6a8db35b34922aed",
    "number_sorting": "4d83e4fdaff21567",
    "palindrome_generation": "cbce42835c855c26",
    "palindrome_partitioning": "6a4cc2ba4e2b9934",
    "path_star": "01ca490513777c53",
    "polynomial_equations": "a21e21f5d00db241",
    "polynomial_multiplication": "9d0c84b6f4f4f8ab",
    "pool_matrix": "be4ed388ae41c346",
    "power_function": "2fb909f6ba1e1ecc",
    "prime_factorization": "b635d7b29313e3f7",
    "products": "57976f338fbe9ae7",
    "propositional_logic": "33ee57cb4e6be105",
    "puzzle24": "930b1f06f4a09e62",
    "quantum_lock": "32847183163aa259",
    "ransom_note": "403021be40e70d1d",
    "rearc": "eb5ccf2fabd18b15",
    "rectangle_count": "33c93b6ea4651a9f",
    "rotate_matrix": "c6a877efce617b7d",
    "rotten_oranges": "cb2c4ce07e77d4eb",
    "rubiks_cube": "764c956bd415c689",
    "rush_hour": "18c2e85fef4ce020",
    "self_reference": "63e7755e61272746",
    "sentence_reordering": "9103a5d355db7ff5",
    "shortest_path": "11e617bade3aaf1c",
    "simple_equations": "85eb6e8fd504faf0",
    "simple_geometry": "fd9d6c0593e2a200",
    "simple_integration": "ab3cd0ddb6f73c7e",
    "sokoban": "4bd66a8caeef73da",
    "spell_backward": "0c5ee32e3ed04073",
    "spiral_matrix": "05345ca996c08000",
    "string_insertion": "bf137bf356450f02",
    "string_manipulation": "caad49a47e835ff5",
    "string_splitting": "6452425bf2914d96",
    "string_synthesis": "952941487d202d3c",
    "sudoku": "0155dfddae597916",
    "survo": "6f5a3de09bb33b22",
    "syllogism": "588c6668c322ae15",
    "time_intervals": "6c1b25945601a91a",
    "tower_of_hanoi": "f8558e890bb376d5",
    "tsumego": "3db709eb1d018ab2",
    "word_ladder": "4343f19c0009f9a1",
    "word_sequence_reversal": "8a4145ab4c82b5dc",
    "word_sorting": "b0460bf1588a659b",
    "zebra_puzzles": "3305e8b927aa3d88",
}


def is_checked(name: str, module: str) -> bool:
    """True if the installed scorer of a generator is the version that was reviewed.

    Args:
      name: name of the generator.
      module: fully qualified name of the module with the generator's data set class.
    """
    return CHECKED.get(name) == digest(module)


def digest(module: str) -> str:
    """Returns a hash of the source of a module and of the reasoning-gym modules that it imports."""
    content = hashlib.sha256()
    for name in sorted(_with_imports(module)):
        content.update(name.encode() + b"\0" + _file(name).read_bytes() + b"\0")
    return content.hexdigest()[:_DIGITS]


def _with_imports(module: str) -> set[str]:
    """Returns the names of a module and of all reasoning-gym modules that its scorer could call."""
    names: set[str] = set()
    waiting = [module, _BASE]
    while waiting:
        name = waiting.pop()
        _, *parts = name.split(".")
        if name in names or not parts or parts[0] in _WITHOUT_SCORERS:
            continue
        names.add(name)
        waiting += _imports(name)
    return names


@functools.cache
def _imports(module: str) -> tuple[str, ...]:
    """Returns the names of the reasoning-gym modules that a module imports."""
    path = _file(module)
    is_package = path.name == "__init__.py"
    package = module if is_package else module.rpartition(".")[0]
    names = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        for name in _imported(node, package):
            if name.split(".")[0] == _PACKAGE and _file(name).is_file():
                names.append(name)
    return tuple(names)


def _imported(node: ast.AST, package: str) -> Iterator[str]:
    """Yields the module names that a statement may import.

    In `from a import b`, both `a` and `a.b` can be modules.

    Args:
      node: a node of a syntax tree. Nodes other than imports yield nothing.
      package: the package to which relative imports refer.
    """
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        relative = "." * node.level + (node.module or "")
        base = importlib.util.resolve_name(relative, package)
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)


def _file(module: str) -> Path:
    """Returns the path of a reasoning-gym module, whether or not the file exists."""
    _, *parts = module.split(".")
    path = _root().joinpath(*parts)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def _root() -> Path:
    """Returns the folder of the installed reasoning-gym package."""
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _table() -> Iterator[str]:
    """Yields the lines of the `CHECKED` table for the installed version of reasoning-gym."""
    from reasoning_gym.factory import DATASETS

    for name, (dataset_class, _) in sorted(DATASETS.items()):
        yield f'    "{name}": "{digest(dataset_class.__module__)}",'


if __name__ == "__main__":
    print("\n".join(_table()))
