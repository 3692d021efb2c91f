"""Packages and subpackages import only from lower layers, which docs/architecture.md shows."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import bacr_jax

ROOT = Path(bacr_jax.__file__).parent
SRC = ROOT.parent
PACKAGES = {
    0: "bacr_io",
    1: "bacr_grading bacr_client bacr_tasks",
    2: "bacr_jax",
    3: "bacr_gguf bacr_plan bacr_serve",
    4: "bacr_doctor bacr_study",
}
LAYERS = {
    0: "errors files types masked out_of_memory static_arguments",
    1: "config curriculum rewards losses",
    2: "advantages parallel questions",
    3: "model prompts",
    4: "rollout methods",
    5: "learner",
    6: "runs",
    7: "evaluation",
    8: "report",
    9: "export",
    10: "training",
    11: "train evaluate generate list_configs list_keys list_methods",
    12: "facade",
    13: "__main__",
}
MATHS = "curriculum rewards advantages losses"


def by_name(layers):
    return {name: layer for layer, names in layers.items() for name in names.split()}


PACKAGE_LAYER, LAYER_OF = by_name(PACKAGES), by_name(LAYERS)


def subpackage_of(module):
    """Returns the subpackage of a module in `bacr_jax`, or the module's package."""
    package, *subpackages = module.split(".")
    return subpackages[0] if package == "bacr_jax" else package


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            # A name may be a module of the package it is taken from.
            folder = SRC.joinpath(*node.module.split("."))
            for alias in node.names:
                is_module = (folder / f"{alias.name}.py").exists() or (folder / alias.name).is_dir()
                yield f"{node.module}.{alias.name}" if is_module else node.module


def subpackage_of_file(path):
    """Returns the first part of a path. Entry points of subpackages are in the top layer."""
    if path.stem == "__main__":
        return path.stem
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def files():
    return [path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem != "__init__"]


def package_of(path):
    return path.relative_to(SRC).parts[0]


def test_every_package_has_a_layer():
    assert {path.parent.name for path in SRC.glob("*/__init__.py")} == PACKAGE_LAYER.keys()


def test_packages_import_from_packages_below():
    wrong = []
    for path in SRC.rglob("*.py"):
        layer = PACKAGE_LAYER[package_of(path)]
        for name in imports(path):
            target = name.split(".")[0]
            if target != package_of(path) and PACKAGE_LAYER.get(target, -1) >= layer:
                wrong.append(f"{path.relative_to(SRC)} imports {name}")
    # What would have fitted is asked for when memory has run out, and only then.
    assert wrong == ["bacr_jax/train.py imports bacr_plan.oom_hints"]


def test_importing_the_library_imports_neither_plan_nor_study():
    modules = ("train", "evaluate", "generate", "export.__main__", "facade", "training.session")
    code = f"""
import importlib, sys
for name in {modules}:
    importlib.import_module(f"bacr_jax.{{name}}")
above = ("bacr_plan", "bacr_study", "bacr_doctor")
wrong = {{name for name in sys.modules if name.split(".")[0] in above}}
assert not wrong, wrong
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_plan_is_asked_for_inside_a_function():
    top = ast.parse((ROOT / "train.py").read_text()).body
    modules = {node.module for node in top if isinstance(node, ast.ImportFrom)}
    assert not {name for name in modules if name.startswith("bacr_plan")}


@pytest.mark.parametrize("package", ["bacr_client", "bacr_io"])
def test_what_is_shared_with_servers_and_graders_needs_python_only(package):
    modules = {name for path in (SRC / package).rglob("*.py") for name in imports(path)}
    assert {name.split(".")[0] for name in modules} - sys.stdlib_module_names == {package}


def test_every_subpackage_has_a_layer():
    subpackages = {subpackage_of_file(path) for path in files()}
    assert subpackages - LAYER_OF.keys() == set()


def test_the_drawing_in_the_docs_has_these_layers():
    page = (SRC.parent / "docs" / "architecture.md").read_text()
    drawings = [
        {
            int(layer): set(names.split())
            for layer, names in re.findall(r"^ +(\d+) +(\S+(?:  \S+)*) {3,}", drawing, re.MULTILINE)
        }
        for drawing in re.findall(r"```text\n(layer .*?)```", page, re.DOTALL)
    ]
    sets = lambda layers: {layer: set(names.split()) for layer, names in layers.items()}
    subpackages_of = sets(LAYERS)
    # The `__main__` of a subpackage is a command.
    del subpackages_of[LAYER_OF["__main__"]]
    assert drawings == [sets(PACKAGES), subpackages_of]


def test_imports_point_down_or_stay_in_their_subpackage():
    wrong = []
    for path in files():
        subpackage = subpackage_of_file(path)
        for name in imports(path):
            if not name.startswith("bacr_jax."):
                continue
            target = subpackage_of(name)
            if target != subpackage and LAYER_OF[target] >= LAYER_OF[subpackage]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_no_cycles_inside_a_room():
    graph = {}
    others = [path for path in SRC.rglob("*.py") if package_of(path) != "bacr_jax"]
    for path in [*files(), *others]:
        name = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = set(imports(path))
    inside = {
        name: {
            other for other in others & graph.keys() if subpackage_of(other) == subpackage_of(name)
        }
        for name, others in graph.items()
    }
    # Raises CycleError, which names the modules.
    assert set(TopologicalSorter(inside).static_order()) == graph.keys()


def test_the_maths_knows_no_model():
    for subpackage in MATHS.split():
        modules = [ROOT / f"{subpackage}.py", *(ROOT / subpackage).rglob("*.py")]
        for path in filter(Path.exists, modules):
            names = set(imports(path))
            assert not {n for n in names if n.startswith(("bacr_jax.model", "bacr_jax.config"))}
            assert not {n for n in names if n.startswith("flax.")}


def test_rooms_below_runs_take_records_and_not_the_config():
    """`methods` is the subpackage that has not been moved yet."""
    wrong = []
    for path in files():
        subpackage = subpackage_of_file(path)
        if LAYER_OF[subpackage] >= LAYER_OF["runs"] or subpackage in ("config", "methods"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bacr_jax"):
                names = {alias.name for alias in node.names}
                if "Config" in names:
                    wrong.append(str(path.relative_to(ROOT)))
    assert wrong == []


def test_config_is_read_before_jax_is_imported():
    checks = ROOT / "training" / "checks.py"
    commands = [ROOT / "train.py", checks, SRC / "bacr_plan" / "__main__.py"]
    for path in (*(ROOT / "config").glob("*.py"), *commands, ROOT / "runs" / "folder.py"):
        tree = ast.parse(path.read_text())
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {getattr(node, "module", None) or node.names[0].name for node in top}
        assert not {name for name in names if name.split(".")[0] in ("jax", "flax", "optax")}
