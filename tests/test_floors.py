"""A module imports only from floors below its own; the rooms are those of docs/architecture.md."""

import ast
from pathlib import Path

import bacr_jax

ROOT = Path(bacr_jax.__file__).parent
FLOORS = {
    0: "errors command_line types masked truncnorm value_baselines config config_checks "
    "config_methods config_types config_reading config_io determinism out_of_memory",
    1: "curriculum difficulty rewards advantages baselines losses text grading parallel",
    2: "model data",
    3: "rollout interop",
    4: "learner methods",
    5: "run_folder interruption alarms metrics progress checkpoint environment policy asked "
    "iteration_metrics iteration warmup cold_start evaluation report saved_policy "
    "adaptation traces provenance trainer planning",
    6: "train export evaluate generate plan study __main__",
}
MATHS = "curriculum rewards advantages value_baselines losses baselines difficulty"
FLOOR_OF = {room: floor for floor, rooms in FLOORS.items() for room in rooms.split()}


def room_of(module):
    return module.split(".")[1]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "bacr_jax":
                yield from (f"bacr_jax.{alias.name}" for alias in node.names)
            else:
                yield node.module


def files():
    return [path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem != "__init__"]


def test_every_room_has_a_floor():
    rooms = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in files()}
    assert rooms - FLOOR_OF.keys() == set()


def test_imports_point_down_or_stay_in_their_room():
    wrong = []
    for path in files():
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for name in imports(path):
            if not name.startswith("bacr_jax."):
                continue
            target = room_of(name)
            # Floors 0 and 5 are made of several modules that lean on one another in one direction.
            same_floor = FLOOR_OF[target] == FLOOR_OF[room] and FLOOR_OF[room] in (0, 5)
            if target != room and FLOOR_OF[target] >= FLOOR_OF[room] and not same_floor:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_the_maths_knows_no_model():
    for room in MATHS.split():
        names = set(imports(ROOT / f"{room}.py"))
        assert not {
            n for n in names if n.startswith(("bacr_jax.model", "bacr_jax.config", "flax."))
        }


def test_config_is_read_before_jax_is_imported():
    configs = ("config", "config_io", "config_checks", "config_methods", "determinism")
    for room in (*configs, "train", "plan", "run_folder"):
        tree = ast.parse((ROOT / f"{room}.py").read_text())
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {getattr(node, "module", None) or node.names[0].name for node in top}
        assert not {name for name in names if name.split(".")[0] in ("jax", "flax", "optax")}
