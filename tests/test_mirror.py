"""A module's tests stand where its name says, or here it says where they stand instead."""

from pathlib import Path

import bacr_jax

SRC = Path(bacr_jax.__file__).parents[1]
TESTS = Path(__file__).parent
# Rooms of tests for the packages next to the library.
ROOMS = {
    # Its modules are tested with those of the same name in bacr_jax.
    "bacr_io": [],
    "bacr_grading": ["grading"],
    "bacr_client": ["client"],
    "bacr_tasks": ["tasks"],
    "bacr_plan": ["planning"],
    "bacr_doctor": ["doctor"],
    "bacr_gguf": ["gguf"],
    "bacr_serve": ["serve"],
    "bacr_study": ["study"],
}

# Modules without a test of their name: the test that asks what they promise, and the modules. A
# new module gets a test of its name; this list only becomes shorter.
PART = "a step of another module, asked through it"
RECORD = "a record of what travels or of what may be set: nothing happens in it"
WIRE = "a wire to files, processes or a server, asked from its end"
DOOR = "a door of a few lines"
DRAWN = "how a page, table or figure looks, asked of the finished one"
ELSEWHERE = {
    ("grading/test_strict.py", PART): "bacr_grading.statement",
    ("grading/test_verifier.py", WIRE): "bacr_grading.verifier_spec .verifier_worker",
    ("config/test_cli.py", DOOR): "bacr_io.command",
    ("test_client.py", PART): "bacr_client.calls .rules",
    ("serve/test_fields.py", RECORD): "bacr_serve.errors",
    ("evaluation/test_served.py", WIRE): "bacr_client.fingerprint .http_json .server",
    ("config/test_checks.py", PART): "bacr_jax.config.budget_checks .training_checks",
    ("config/test_schema.py", RECORD): "bacr_jax.config.method_settings",
    ("evaluation/test_job.py", PART): "bacr_jax.config.engine",
    ("export/test_main.py", PART): "bacr_jax.export.from_run",
    ("doctor/test_paths.py", PART): "bacr_doctor.checks bacr_doctor.reference bacr_doctor.trial",
    ("questions/test_source.py", PART): "bacr_jax.config.user_modules",
    ("tasks/test_gym.py", WIRE): "bacr_tasks.gym_score",
    ("learner/test_sharded.py", PART): "bacr_jax.learner.copies",
    ("learner/test_updates.py", RECORD): "bacr_jax.learner.spec",
    ("model/test_qwen2.py", RECORD): "bacr_jax.model.compute",
    ("model/test_adapters.py", WIRE): "bacr_jax.model.hf.peft",
    ("parallel/test_processes.py", WIRE): "bacr_jax.parallel.launcher_env",
    ("prompts/test_encoding.py", PART): "bacr_jax.prompts.chat_template",
    ("questions/test_main.py", DRAWN): "bacr_jax.prompts.show_prompts",
    ("questions/test_prepare.py", RECORD): "bacr_jax.questions.published_sets",
    ("report/test_evaluation.py", DRAWN): "bacr_jax.report.evaluation_charts",
    ("report/test_page.py", DRAWN): "bacr_jax.report.html_page",
    ("rollout/test_rollouts.py", RECORD): "bacr_jax.rollout.rows",
    ("training/test_initialize.py", PART): "bacr_jax.runs.initial",
    ("test_train.py", RECORD): "bacr_jax.training.events",
    ("test_plan.py", DOOR): "bacr_plan.__main__",
    ("planning/test_costs.py", PART): "bacr_plan.lengths",
    ("study/test_results.py", DRAWN): "bacr_study.effects .figure_parts .items .tables",
    ("study/test_budget_use.py", DRAWN): "bacr_study.budget_figures .budget_tables",
}


def modules_of(names):
    """Full names, where `.name` stands for a neighbour of the one before it."""
    found = []
    for name in names.split():
        found.append(found[-1].rpartition(".")[0] + name if name.startswith(".") else name)
    return found


LISTED = {module for names in ELSEWHERE.values() for module in modules_of(names)}


def name_of(path):
    return ".".join(path.relative_to(SRC).with_suffix("").parts)


def own_test(path):
    """Where the mirror has it; `__main__` is `test_main.py`."""
    package = path.parent.relative_to(SRC)
    rooms = ROOMS.get(str(package), package.parts[1:])
    return TESTS.joinpath(*rooms, f"test_{path.stem.strip('_')}.py").is_file()


def modules():
    return [path for path in SRC.rglob("*.py") if path.stem != "__init__"]


def test_a_module_has_a_test_of_its_name_or_says_where_it_is_tested():
    without = {name_of(path) for path in modules() if not own_test(path)}
    assert sorted(without - LISTED) == [], "write a test of its name"
    assert sorted(LISTED - without) == [], "it has a test of its name: take it off the list"


def test_the_tests_named_instead_are_there():
    assert [name for name, _ in ELSEWHERE if not (TESTS / name).is_file()] == []


def test_the_map_of_what_tests_share_names_all_of_it():
    page = (TESTS / "support" / "README.md").read_text()
    helpers = [path.name for path in (TESTS / "support").glob("*.*") if path.name != "README.md"]
    assert [name for name in helpers if f"`{name}`" not in page] == []
