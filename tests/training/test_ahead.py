"""What is compiled beside the warm-up changes no number, and the first step finds it there."""

import threading

import jax.monitoring
import pytest

from bacr_jax.runs.metrics import without_timings
from bacr_jax.training import start
from bacr_jax.training.ahead import compiled_ahead
from test_train import SMALL

COMPILED = "/jax/core/compile/backend_compile_duration"


def test_a_failure_of_the_work_beside_is_not_the_runs():
    def work(poll):
        raise ValueError("memory, perhaps")

    with compiled_ahead(work) as begin:
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

    with compiled_ahead(work) as begin:
        begin()
        begin()
        started.wait(10)
        go_on.set()
    assert seen == ["finished"]
    started.clear()
    go_on.clear()
    with pytest.raises(KeyError), compiled_ahead(work) as begin:
        begin()
        started.wait(10)
        raise KeyError
    assert seen == ["finished"]
    with compiled_ahead(work):
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


@pytest.mark.slow  # two whole runs
def test_nothing_of_the_loop_is_compiled_after_the_warm_up(compiled, tmp_path, monkeypatch):
    from bacr_jax.train import run

    config = tmp_path / "small.yaml"
    config.write_text(SMALL)
    keys = ("train.steps=1", "output.report=false", "output.tensorboard=false")
    at_start = []

    def tell(event):
        if type(event).__name__ == "Started":
            at_start.append(len(compiled))

    run(config, [*keys, f"output.dir={tmp_path / 'ahead'}"], callbacks=[tell])
    late = {name.removeprefix("jit(").removesuffix(")") for name in compiled[at_start[0] :]}
    known = {name.removeprefix("jit(").removesuffix(")") for name in compiled[: at_start[0]]}
    loop = {"plan_batch", "train_step", "decode_trunks", "decode_branches", "credit_tokens"}
    assert loop <= known and not late & {"plan_batch", "train_step", "credit_tokens"}
    monkeypatch.setattr(start, "can_go_ahead", lambda run: False)
    run(config, [*keys, f"output.dir={tmp_path / 'later'}"])
    one, other = (without_timings(tmp_path / name / "metrics.jsonl") for name in ("ahead", "later"))
    assert one == other != []
