"""Tests the state from which a run starts, its warm-up, and compilation in the background."""

import dataclasses
import inspect
import threading

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.methods import RejectionSFT
from bacr_jax.model import qwen2
from bacr_jax.parallel import MeshShape
from bacr_jax.prompts.formats import FORMATS
from bacr_jax.prompts.task_data import build_task_data
from bacr_jax.questions import ledger, loaders
from bacr_jax.runs.folder import RunFolder, WarmupPaths
from bacr_jax.runs.metrics import without_timings
from bacr_jax.runs.progress import Progress
from bacr_jax.runs.setup import make_policy
from bacr_jax.training import initialize
from bacr_jax.training.initialize import compiling_in_background
from methods_world import load, run_of
from whole_runs import WHOLE_RUN

# The function without runtime type checks, so that a test can replace the evaluation of a warm-up.
initial_state = inspect.unwrap(initialize.initial_state)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A run of BACR around a random policy, and a state of it."""
    tokenizer = ledger.ledger_tokenizer()
    config = load(tmp_path_factory.mktemp("start"), None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaders, "LEDGER_TEST_SIZE", 20)
        yield run_of(config, (tokenizer, len(tokenizer)))


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path, None)


def changed(run, **sections):
    """The run with some settings changed."""
    parts = {
        name: dataclasses.replace(getattr(run.config, name), **keys)
        for name, keys in sections.items()
    }
    return dataclasses.replace(run, config=dataclasses.replace(run.config, **parts))


def same(one, other):
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b) for a, b in leaves)


def test_without_a_warm_up_policy_and_value_head_are_random_by_the_seed(world, folder):
    run, _ = world
    reseeded = dataclasses.replace(run, config=dataclasses.replace(run.config, seed=1))
    one, other = (initial_state(r, folder, Progress(enabled=False))[1] for r in (run, reseeded))
    assert not same(one.train.policy["embed"], other.train.policy["embed"])
    assert not same(one.train.head, other.train.head)
    assert one.generated_tokens == 0 and int(one.curriculum.updates) == 0
    # The budget embedding phi is initially zero, so the policy equals the model without it.
    assert not np.any(one.train.policy["budget"]["w2"])


def test_a_resumed_run_restores_into_shapes_and_shardings_of_its_first_state(world, folder):
    run, _ = world
    policy = make_policy(
        resolve(run.config).policy, run.method, run.task_data.vocab_size, MeshShape(1, 1, 1, 1)
    )
    run = dataclasses.replace(run, policy=policy)
    _, real = initial_state(run, folder, Progress(enabled=False))
    target = initialize.abstract_state(run)
    facts = lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding)
    assert jax.tree.map(facts, target.train) == jax.tree.map(facts, real.train)
    assert {type(leaf) for leaf in jax.tree.leaves(target.train)} == {jax.ShapeDtypeStruct}


@pytest.fixture
def warm(monkeypatch):
    """A warm-up that only measures what it would have trained."""
    seen = {}

    def warm_up(settings, fingerprint, policy, place, *, accuracy_of, **rest):
        plain = qwen2.init(jax.random.key(9), policy.learner.model)
        seen.update(place=place, plain=plain, accuracy=accuracy_of(plain))
        seen.update(settings=settings, first_batch=rest["batches"](0, False))
        seen.update(texts_digest=rest["texts_digest"])
        return plain

    def evaluate(decoder, task_data, questions, key, **options):
        seen.update(options, style=task_data.style.name, gates=decoder.params.gates)
        seen.update(spec=decoder.spec, phi_of=decoder.phi_of)
        budgets = options["config"].budgets
        greedy = {str(budget): {"accuracy": 0.25} for budget in budgets}
        return {"by_budget": {"greedy": greedy}}

    monkeypatch.setattr(initialize, "warm_up", warm_up)
    monkeypatch.setattr(initialize, "evaluate_set", evaluate)
    return seen


def test_a_warm_up_is_of_the_plain_model_and_gets_a_fresh_budget_module(world, folder, warm):
    run, _ = world
    _, state = initial_state(changed(run, warmup={"steps": 5}), folder, Progress(enabled=False))
    policy = dict(state.train.policy)
    module = policy.pop("budget")
    assert same(policy, warm["plain"]) and not np.any(module["w2"]) and np.any(module["w1"])
    assert warm["place"] == folder.warmup


def test_a_warm_up_is_measured_greedily_at_the_largest_budget_without_telling_it(
    world, folder, warm
):
    run, _ = world
    several = changed(run, warmup={"steps": 5}, eval={"budgets": (4, 12), "samples": 3})
    initial_state(several, folder, Progress(enabled=False))
    assert warm["accuracy"] == 0.25
    assert (warm["config"].budgets, warm["config"].samples) == ((12,), 0)
    assert warm["phi_of"] is warm["gates"] is warm["spec"].conditioning is None


def test_a_warm_up_on_traces_records_their_digest(world, folder, warm, monkeypatch):
    run, _ = world
    run = changed(run, warmup={"steps": 5})
    initial_state(run, folder, Progress(enabled=False))
    # Batches of the ledger depend only on settings, which are part of the fingerprint.
    assert warm["texts_digest"] is None
    data_of = initialize._warmup_data
    with_digest = lambda *inputs: dataclasses.replace(data_of(*inputs), texts_digest="abc")
    monkeypatch.setattr(initialize, "_warmup_data", with_digest)
    initial_state(run, folder, Progress(enabled=False))
    assert warm["texts_digest"] == "abc"


def test_the_seed_of_a_warm_up_decides_its_batches_and_its_measurement(world, folder, warm):
    run, _ = world

    def begun(seed, warmup_seed):
        of = changed(run, warmup={"steps": 5, "seed": warmup_seed})
        of = dataclasses.replace(of, config=dataclasses.replace(of.config, seed=seed))
        _, state = initial_state(of, folder, Progress(enabled=False))
        return warm["settings"], warm["seed"], warm["first_batch"], state

    config, measured, batch, state = begun(7, None)
    same_config, same_measured, same_batch, other_state = begun(8, 7)
    assert (config, measured) == (same_config, same_measured)
    assert same(batch, same_batch) and not same(begun(8, None)[2], batch)
    # The random parameters that are not part of the warm-up depend on the seed of the run.
    fresh = lambda state: state.train.policy["budget"]["w1"]
    assert not same(fresh(state), fresh(other_state))


def test_methods_can_share_the_folder_of_a_warm_up(world, folder, warm, tmp_path):
    run, _ = world
    shared = changed(run, warmup={"steps": 5, "dir": str(tmp_path / "shared")})
    initial_state(shared, folder, Progress(enabled=False))
    assert warm["place"] == tmp_path / "shared"


def test_a_finished_warm_up_compiles_no_first_step(world, folder, warm, tmp_path, capsys):
    run, _ = world
    shared = tmp_path / "shared"
    run = changed(run, warmup={"steps": 5, "dir": str(shared)})
    initial_state(run, folder, Progress())
    assert "compiling its first step" in capsys.readouterr().out
    shared.mkdir()
    WarmupPaths(shared).identity.write_text("{}")
    initial_state(run, folder, Progress())
    assert "reading finished weights" in capsys.readouterr().out


def test_a_resumed_run_reads_a_finished_warm_up_without_its_traces(
    world, folder, tmp_path, monkeypatch
):
    """They may have been edited since, or be refused by newer checks."""
    run, _ = world
    shared = tmp_path / "shared"
    shared.mkdir()
    WarmupPaths(shared).identity.write_text("{}")
    run = changed(run, warmup={"steps": 5, "dir": str(shared)})
    read = []

    def warm_up(settings, fingerprint, policy, place, *, texts_digest, **rest):
        read.append(texts_digest)
        return qwen2.init(jax.random.key(9), policy.learner.model)

    def refuse(*_):
        raise UserError("a trace has a tag")

    monkeypatch.setattr(initialize, "warm_up", warm_up)
    monkeypatch.setattr(initialize, "_warmup_data", refuse)
    with pytest.raises(UserError, match="a trace has a tag"):
        initial_state(run, folder, Progress(enabled=False))
    (folder.checkpoints / "3").mkdir(parents=True)
    try:
        initial_state(run, folder, Progress(enabled=False))
    finally:
        (folder.checkpoints / "3").rmdir()
    assert read == [None]


def test_a_method_without_a_stage_of_its_own_starts_as_it_is(world):
    run, state = world
    assert initialize.after_rejection_sft(run, state, Progress(enabled=False)) is state


def test_a_methods_own_stage_changes_policy_and_memory_and_its_tokens_count(world, monkeypatch):
    run, state = world
    stage = RejectionSFT(None, 2, 1e-3, 256, str, lambda *_: None)
    staged = dataclasses.replace(run, method=dataclasses.replace(run.method, rejection_sft=stage))
    learned = jax.tree.map(lambda x: x + 1.0, state.train.policy)
    monkeypatch.setattr(initialize, "rejection_sft", lambda *a, **k: (learned, "memory", 77))
    fresh = dataclasses.replace(state, train=jax.tree.map(jnp.copy, state.train))
    after = initialize.after_rejection_sft(staged, fresh, Progress(enabled=False))
    # The supervised steps don't need memory for the moments of reinforcement learning.
    moments = jax.tree.leaves(fresh.train.policy_opt)
    assert moments and all(moment.is_deleted() for moment in moments)
    assert (after.method_state, after.generated_tokens) == ("memory", 77)
    assert same(after.train.policy, learned)
    # The rest of the train state, which includes the optimizer states, is unchanged.
    but_policy = lambda train: dataclasses.replace(train, policy=None)
    assert same(but_policy(after.train), but_policy(state.train))


def test_the_shared_format_is_the_runs_own_unless_the_method_has_another(world):
    run, _ = world
    assert (
        initialize.shared_format_task_data(resolve(run.config).task, run.task_data) is run.task_data
    )
    here = run.task_data
    own = build_task_data(
        resolve(run.config).task,
        here.tokenizer,
        here.vocab_size,
        style=FORMATS["ledger_budget"],
    )
    shared = initialize.shared_format_task_data(resolve(run.config).task, own)
    assert shared.style is FORMATS["ledger"]
    assert shared.train.set.questions == own.train.set.questions


COMPILED = "/jax/core/compile/backend_compile_duration"


def test_a_failure_of_the_work_beside_is_not_the_runs():
    def work(poll):
        raise ValueError("memory, perhaps")

    with compiling_in_background(work) as begin:
        begin()
        done = 1
    assert done == 1


def test_the_work_is_waited_for_and_left_only_where_the_run_has_failed():
    started, go_on, seen = threading.Event(), threading.Event(), []

    def work(poll):
        started.set()
        while not go_on.wait(0.01):
            poll()
        seen.append("finished")

    with compiling_in_background(work) as begin:
        begin()
        begin()
        started.wait(10)
        go_on.set()
    assert seen == ["finished"]
    started.clear()
    go_on.clear()
    with pytest.raises(KeyError), compiling_in_background(work) as begin:
        begin()
        started.wait(10)
        raise KeyError
    assert seen == ["finished"]
    with compiling_in_background(work):
        pass
    assert seen == ["finished"]


@pytest.fixture
def compiled(monkeypatch):
    """Names of the programs that are compiled."""
    found = []

    def listen(event, seconds, fun_name="", **_):
        if event == COMPILED:
            found.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow  # two complete runs
def test_nothing_of_the_loop_is_compiled_after_the_warm_up(compiled, tmp_path, monkeypatch):
    from bacr_jax.train import run

    config = tmp_path / "small.yaml"
    config.write_text(WHOLE_RUN)
    keys = ("train.steps=1", "output.report=false", "output.tensorboard=false")
    at_start = []

    def tell(event):
        if type(event).__name__ == "Started":
            at_start.append(len(compiled))

    run(config, [*keys, f"output.dir={tmp_path / 'ahead'}"], callbacks=[tell])
    late = {name.removeprefix("jit(").removesuffix(")") for name in compiled[at_start[0] :]}
    known = {name.removeprefix("jit(").removesuffix(")") for name in compiled[: at_start[0]]}
    loop = {"plan_batch", "train_step", "decode_trunks", "decode_branches", "token_advantages"}
    assert loop <= known and not late & {"plan_batch", "train_step", "token_advantages"}
    monkeypatch.setattr(initialize, "can_compile_ahead", lambda run: False)
    run(config, [*keys, f"output.dir={tmp_path / 'later'}"])
    one, other = (without_timings(tmp_path / name / "metrics.jsonl") for name in ("ahead", "later"))
    assert one == other != []
