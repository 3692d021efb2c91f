"""A module imports only from floors below its own; the rooms are those of docs/architecture.md."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import bacr_jax

ROOT = Path(bacr_jax.__file__).parent
FLOORS = {
    0: "errors documents types masked oom",
    1: "config curriculum rewards losses",
    2: "advantages parallel grading",
    3: "model data",
    4: "rollout methods",
    5: "learner runs",
    6: "evaluation planning",
    7: "report",
    8: "training",
    9: "train evaluate generate plan export",
    10: "study facade",
    11: "__main__",
}
MATHS = "curriculum rewards advantages losses"
FLOOR_OF = {room: floor for floor, rooms in FLOORS.items() for room in rooms.split()}


def room_of(module):
    return module.split(".")[1]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            # A name may be a module of the package it is taken from.
            folder = ROOT.parent.joinpath(*node.module.split("."))
            for alias in node.names:
                is_module = (folder / f"{alias.name}.py").exists() or (folder / alias.name).is_dir()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def room_of_file(path):
    """The first part of its path; the entry points of rooms are on the top floor."""
    if path.stem == "__main__":
        return path.stem
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def files():
    return [path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem != "__init__"]


def test_every_room_has_a_floor():
    rooms = {room_of_file(path) for path in files()}
    assert rooms - FLOOR_OF.keys() == set()


def test_the_drawing_in_the_docs_has_these_floors():
    page = (ROOT.parents[1] / "docs" / "architecture.md").read_text()
    drawn = re.findall(r"^ +(\d+) +(\S+(?:  \S+)*) {3,}", page, re.MULTILINE)
    of_docs = {int(floor): set(rooms.split()) for floor, rooms in drawn}
    rooms_of = {floor: set(rooms.split()) for floor, rooms in FLOORS.items()}
    # The `__main__` of a room is a command.
    del rooms_of[FLOOR_OF["__main__"]]
    assert of_docs == rooms_of


def test_imports_point_down_or_stay_in_their_room():
    wrong = []
    for path in files():
        room = room_of_file(path)
        for name in imports(path):
            if not name.startswith("bacr_jax."):
                continue
            target = room_of(name)
            if target != room and FLOOR_OF[target] >= FLOOR_OF[room]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_no_cycles_inside_a_room():
    graph = {}
    for path in files():
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        graph[f"bacr_jax.{name}"] = set(imports(path))
    inside = {
        name: {other for other in others & graph.keys() if room_of(other) == room_of(name)}
        for name, others in graph.items()
    }
    # Raises CycleError, which names the modules.
    assert set(TopologicalSorter(inside).static_order()) == graph.keys()


def test_the_maths_knows_no_model():
    for room in MATHS.split():
        modules = [ROOT / f"{room}.py", *(ROOT / room).rglob("*.py")]
        for path in filter(Path.exists, modules):
            names = set(imports(path))
            assert not {n for n in names if n.startswith(("bacr_jax.model", "bacr_jax.config"))}
            assert not {n for n in names if n.startswith("flax.")}


def test_config_is_read_before_jax_is_imported():
    modules = [*(ROOT / "config").glob("*.py"), *(ROOT / f"{n}.py" for n in ("train", "plan"))]
    for path in (*modules, ROOT / "runs" / "folder.py"):
        tree = ast.parse(path.read_text())
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {getattr(node, "module", None) or node.names[0].name for node in top}
        assert not {name for name in names if name.split(".")[0] in ("jax", "flax", "optax")}
