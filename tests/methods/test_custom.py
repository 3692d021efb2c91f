"""Methods of one's own: a file named in the config."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bacr_jax
from bacr_jax.config.settings import resolve
from bacr_jax.curriculum import init_curriculum
from bacr_jax.errors import UserError
from bacr_jax.files import read_lines
from bacr_jax.methods import load_method
from bacr_jax.questions import ledger
from bacr_jax.training.algorithm import iterate
from bacr_jax.training.events import StepDone
from methods_world import Odd, load, run_of

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def module_of(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """An iteration of the example method; its step is compiled once."""
    own = ledger.ledger_tokenizer()
    folder = tmp_path_factory.mktemp("custom")
    config = load(folder, None, f"method={EXAMPLES / 'custom_method.py'}", "value.bias_start=false")
    return run_of(config, (own, len(own)), Odd())


def test_an_embedding_of_a_budget_that_is_not_held_is_refused(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "import dataclasses\nfrom bacr_jax.methods import bacr\n"
        "def make(config): return dataclasses.replace(bacr.make(config), "
        "truncates_at_budget=False)\n"
    )
    with pytest.raises(
        UserError, match="returned conditioned=True with truncates_at_budget=False, but a budget"
    ):
        load_method(resolve(load(tmp_path, None, f"method={own}")).method)


def test_the_example_is_short_and_of_public_names_alone():
    source = (EXAMPLES / "custom_method.py").read_text()
    assert len(source.splitlines()) <= 60
    assert "._" not in source


@pytest.mark.slow
def test_a_file_named_in_the_config_trains(world):
    run, state = world
    assert run.method.name == "Brief BCAE"
    state = jax.tree.map(lambda x: x.copy() if hasattr(x, "copy") else x, state)
    start = jax.tree.map(np.array, state.train.policy)
    state, done = iterate(run, state, 0)
    metrics = done.metrics
    assert 0 < metrics["brief/thinking_share"] <= 1
    right = done.chosen.group_batch.outcomes.reshape(-1)
    used = np.asarray(done.chosen.rollout.trunks.thinking) / 12
    np.testing.assert_allclose(
        metrics["reward/mean"], (right * (1.2 - 0.2 * used)).mean(), rtol=1e-5
    )
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), start, state.train.policy)
    assert max(jax.tree.leaves(moved)) > 0


def test_a_file_that_reads_another_section_is_refused_with_the_names_it_can_read(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "from bacr_jax.methods import grpo\n"
        "def make(config):\n"
        "    print(config.eval.size)\n"
        "    return grpo.make(config)\n"
    )
    with pytest.raises(UserError) as refusal:
        load_method(resolve(load(tmp_path, None, f"method={own}")).method)
    line = str(refusal.value)
    assert (
        "'eval' is not one of the settings that a method can read; use one of method, "
        "conditioning, budget, " in line
    )
    assert line.endswith("(own.py, line 3); fix the file")
    assert line.isprintable()


def test_a_file_can_replace_a_section_before_a_built_in_method_reads_it(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "import dataclasses\n"
        "from bacr_jax.methods import bacr\n"
        "def make(config):\n"
        "    budget = dataclasses.replace(config.budget, prior='choices', choices=(9, 11))\n"
        "    return bacr.make(dataclasses.replace(config, budget=budget))\n"
    )
    config = load(tmp_path, "bacr-full", f"method={own}")
    method = load_method(resolve(config).method)
    state = init_curriculum(4, mu0=8.0)
    budgets = method.sample_budgets(jax.random.key(0), state, jnp.arange(64) % 4)
    assert set(np.asarray(budgets).flat) == {9, 11}


RUNNING_MEAN = """
import dataclasses
import numpy as np
from bacr_jax.methods import grpo


def make(config):
    def update(state, batch, rewards, values):
        mean = state["mean"] + {step_size} * (rewards.mean() + 0.25 - state["mean"])
        return {{"mean": mean, "steps": state["steps"] + 1}}

    return dataclasses.replace(
        grpo.make(config),
        name="Own",
        init_state=lambda num_questions: {start},
        update=update,
        metrics=lambda state, batch: {{f"own/{{name}}": x for name, x in state.items()}},
    )
"""


class Stopped(Exception):
    """Stops a run from a callback."""


def stop_after_a_step(event):
    if isinstance(event, StepDone):
        raise Stopped


def load_own(folder, own):
    folder.mkdir(exist_ok=True)
    keys = ("train.steps=2", "conditioning.budget_input=none", "eval.every=null")
    return load(folder, None, f"method={own}", *keys, "output.report=false")


def test_a_run_starts_with_arrays_in_place_of_the_numbers_of_a_state(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(RUNNING_MEAN.format(step_size=0.5, start="{'mean': 0.0, 'steps': np.int64(0)}"))
    tokenizer = ledger.ledger_tokenizer()
    _, state = run_of(load_own(tmp_path, own), (tokenizer, len(tokenizer)))
    types = {name: (type(x), x.dtype) for name, x in state.method_state.items()}
    array = type(jnp.zeros(()))
    assert types == {"mean": (array, jnp.float32), "steps": (array, jnp.int32)}
    own.write_text(RUNNING_MEAN.format(step_size=0.5, start="{'mean': 'zero'}"))
    with pytest.raises(UserError, match=f"^method={own}: state.'mean'. is 'zero', which can't be"):
        run_of(load_own(tmp_path, own), (tokenizer, len(tokenizer)))


@pytest.mark.slow
def test_a_stopped_run_resumes_with_its_numbers_unless_the_file_was_changed(tmp_path):
    own = tmp_path / "own.py"
    text = RUNNING_MEAN.format(step_size=0.5, start="{'mean': 0.0, 'steps': 0}")
    own.write_text(text)
    uninterrupted = load_own(tmp_path / "uninterrupted", own)
    bacr_jax.train(uninterrupted)
    stopped = load_own(tmp_path / "stopped", own)
    with pytest.raises(Stopped):
        bacr_jax.train(stopped, callbacks=[stop_after_a_step])
    # Refused by the file and not by the state, which is restored later.
    own.write_text(RUNNING_MEAN.format(step_size=0.125, start="{'mean': 0.0}"))
    with pytest.raises(UserError, match=f"^method={own}: the code of the method was changed after"):
        bacr_jax.train(stopped)
    own.write_text(text)
    assert bacr_jax.train(stopped).step == 2
    means = []
    for config in (uninterrupted, stopped):
        records = read_lines(Path(config.output.dir) / "metrics.jsonl")
        means.append([(record["own/mean"], record["own/steps"]) for record in records])
    assert means[0] == means[1] and len(means[0]) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "no file"),
        ("import nowhere_at_all\n", "can't be imported"),
        ("def make(config) ->\n", "can't be imported"),
        ("x = 1\n", "does not define the function make"),
        (
            "def make(config):\n    return 1\n",
            "returned an object of the type int; return a Method",
        ),
    ],
)
def test_a_file_that_is_no_method_is_refused(tmp_path, text, says):
    import dataclasses

    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    config = dataclasses.replace(load(tmp_path), method=str(path))
    with pytest.raises(UserError, match=says):
        load_method(resolve(config).method)
