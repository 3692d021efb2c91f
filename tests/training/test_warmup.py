"""Tests the schedules of the warm-up, which ends when the policy is accurate enough."""

import copy
import inspect
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.methods import load_method
from bacr_jax.parallel.preemption import Preempted
from bacr_jax.prompts.task_data import build_task_data
from bacr_jax.questions import ledger
from bacr_jax.questions.loaders import own_tokenizer
from bacr_jax.runs.folder import LOCK, lock_if_free
from bacr_jax.runs.setup import make_policy
from bacr_jax.training import initialize, warmup
from bacr_jax.training.warmup_folder import warmup_fingerprint
from learner_world import SPEC
from methods_world import load

TRADEOFF = (
    "data.ledger.variant=tradeoff", "warmup.style=at_once", "warmup.steps=10",
    "warmup.target_accuracy=0.9", "warmup.max_hold=1",
)  # fmt: skip


@pytest.mark.parametrize(("style", "opened"), [("steps", "a"), ("at_once", "start digit")])
def test_prompts_of_a_style_hold_its_first_token(tmp_path, style, opened):
    tokenizer = ledger.ledger_tokenizer()
    questions = build_task_data(
        resolve(load(tmp_path, None, *TRADEOFF)).task, tokenizer, len(tokenizer)
    ).train
    prompts, answers = warmup.styled_prompts(questions, style, 4, 8)
    assert len(answers) == len(prompts.lengths) == (questions.set.levels == 4).sum()
    for row, answer in enumerate(answers):
        text = tokenizer.decode(prompts.tokens[row, : prompts.lengths[row]])
        question = text.removeprefix("<bos>").partition("<think>")[0]
        digits = [int(c) for c in question if c.isdigit()]
        assert len(digits) == 5 and str(sum(digits) % 10) == answer
        assert text.endswith("<think>" + ("a" if opened == "a" else question[0]))


def test_prompts_of_a_style_tell_the_budget_where_it_is_told_in_words(tmp_path):
    tokenizer = ledger.ledger_tokenizer()
    config = load(tmp_path, None, *TRADEOFF, "conditioning.budget_input=prompt")
    questions = build_task_data(resolve(config).task, tokenizer, len(tokenizer)).train
    prompts, _ = warmup.styled_prompts(questions, "steps", 4, 12)
    for row, length in zip(prompts.tokens, prompts.lengths):
        assert tokenizer.decode(row[:length]).endswith("f12<think>a")


def test_a_warm_up_that_another_run_makes_is_waited_for_and_read(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "warm"
    monkeypatch.setattr(warmup, "read_warmup", lambda *_: "theirs")
    monkeypatch.setattr(time, "sleep", lambda _: None)
    theirs, polled = lock_if_free(folder / LOCK), []

    def poll():
        polled.append(len(polled))
        if len(polled) == 3:
            (folder / "warmup.json").write_text("{}")
            theirs.close()

    read = inspect.unwrap(warmup.warm_up)(
        resolve(load(tmp_path, None, "warmup.steps=10")).warmup,
        "fingerprint",
        SimpleNamespace(learner=SPEC, abstract=lambda _: None),
        folder,
        **dict.fromkeys(("batches", "styles", "accuracy_of", "on_progress")),
        poll=poll,
    )
    assert read == "theirs" and polled == [0, 1, 2]
    assert (
        capsys.readouterr().err == f"waiting for another run that trains the warm-up in {folder}\n"
    )


class Run(warmup.WarmUp):
    """A warm-up whose style gains .1 every 25 steps, and .2 while the rate falls."""

    def __init__(self, config):
        self.settings = resolve(config).warmup
        self.params, self.journal = np.zeros(()), []
        self.step = self.planned = self.measurements = 0

    def advance(self, steps, rate, practice=False):
        self.step += steps
        falls = rate(steps - 1) < 0.5 * rate(0)
        self.params = self.params + (0.2 if falls else 0.004 * steps)

    def copy(self):
        return copy.copy(self)


until_style = inspect.unwrap(warmup.until_style)


@pytest.mark.parametrize(("low", "high", "ends"), [(0.6, 0.85, 0.6), (0.3, 0.5, 0.3)])
def test_the_warm_up_ends_when_ending_gives_what_is_asked(tmp_path, low, high, ends):
    config = load(tmp_path, None, *TRADEOFF, f"warmup.style_accuracy=[{low}, {high}]")
    run = Run(config)
    accuracy = lambda params, style: 1.0 if style == "steps" else float(params)
    found = until_style(run, accuracy)
    assert low <= found["at_once_accuracy"] <= high
    assert found["at_once_accuracy"] == pytest.approx(ends, abs=0.13)
    assert float(run.params) == found["at_once_accuracy"]


def test_a_style_that_is_too_good_or_never_good_enough_is_refused(tmp_path):
    config = load(tmp_path, None, *TRADEOFF)
    for wrong in (lambda p, s: 0.99, lambda p, s: 0.1):
        with pytest.raises(UserError, match="target: 0.6 to 0.85"):
            until_style(Run(config), wrong)


class Practised(warmup.WarmUp):
    """A warm-up that is right at length at once, and briefly after so many rounds of practice."""

    def __init__(self, config, rounds, at_length=1.0):
        self.settings = resolve(config).warmup
        self.params, self.journal = None, []
        self.step = self.planned = self.measurements = self.practised = 0
        self.rounds, self.at_length = rounds, at_length

    def advance(self, steps, rate, practice=False):
        self.step += steps
        self.practised += practice


def until_accurate(run, monkeypatch):
    monkeypatch.setattr(warmup, "short_accuracy", lambda run: float(run.practised >= run.rounds))
    return warmup.until_accurate(run, lambda params: run.at_length)


REDUNDANT = ("data.ledger.variant=redundant", "warmup.steps=800", "warmup.max_hold=3")


@pytest.mark.parametrize(("rounds", "steps"), [(0, 800), (1, 1180), (3, 1940)])
def test_the_short_style_is_practised_until_it_is_right(tmp_path, monkeypatch, rounds, steps):
    # A round consists of 100 steps, and of a decay of the learning rate over 35 % of 800 steps.
    run = Practised(load(tmp_path, None, *REDUNDANT), rounds)
    assert until_accurate(run, monkeypatch) == {"accuracy": 1.0, "short_accuracy": 1.0}
    assert (run.step, run.planned, run.practised) == (steps, steps, rounds)


def test_a_short_style_that_is_never_right_is_refused(tmp_path, monkeypatch):
    run = Practised(load(tmp_path, None, *REDUNDANT), 4)
    with pytest.raises(
        UserError, match=r"short traces at the weakest level is 0.00, .* warmup.short_accuracy=0.9"
    ):
        until_accurate(run, monkeypatch)


def test_accuracies_without_a_target_are_measured_only_to_compare_styles(tmp_path):
    keys = ("data.ledger.variant=tradeoff", "warmup.target_accuracy=0", "warmup.hold_accuracy=0")
    run = Practised(load(tmp_path, None, *keys), 0)
    measured = []

    def accuracy_of(params, style):
        measured.append(style)
        return 0.5

    assert warmup._train(run, (), accuracy_of) == {}
    assert warmup._train(run, ("solution",), accuracy_of) == {}
    assert measured == []
    both = {"short_accuracy": 0.5, "long_accuracy": 0.5}
    assert warmup._train(run, ("short", "long"), accuracy_of) == {"accuracy": 0.5, **both}
    assert sorted(measured) == ["long", "short"]


def test_nothing_is_practised_where_it_is_not_asked_or_the_policy_is_wrong(tmp_path, monkeypatch):
    run = Practised(load(tmp_path, None, *REDUNDANT, "warmup.short_accuracy=0"), 1)
    assert until_accurate(run, monkeypatch) == {"accuracy": 1.0} and run.step == 800
    tradeoff = load(tmp_path, None, *REDUNDANT[1:], "data.ledger.variant=tradeoff")
    assert until_accurate(Practised(tradeoff, 1), monkeypatch) == {"accuracy": 1.0}
    run = Practised(load(tmp_path, None, *REDUNDANT), 0, at_length=0.9)
    with pytest.raises(
        UserError, match="the largest budget is 0.90, .* warmup.target_accuracy=0.95"
    ):
        until_accurate(run, monkeypatch)
    # All three extensions are used before the decay, so none is left for practice.
    assert run.practised == 0


@pytest.mark.parametrize(("hold", "measured"), [(0, 1), (0.5, 2)])
def test_a_fixed_number_of_steps_is_measured_at_its_end_alone(tmp_path, hold, measured):
    settings = (f"warmup.hold_accuracy={hold}", "warmup.short_accuracy=0")
    run, asked = Practised(load(tmp_path, None, *REDUNDANT, *settings), 0), []
    found = warmup.until_accurate(run, lambda params: asked.append(run.step) or 1.0)
    assert found == {"accuracy": 1.0} and run.step == 800
    assert asked == [520, 800][-measured:]


def test_the_redundant_ledger_has_no_single_style_to_stop_by(tmp_path):
    with pytest.raises(UserError, match="variant=tradeoff"):
        load(tmp_path, None, *(key for key in TRADEOFF if "variant" not in key))


def test_the_benchmark_config_is_good():
    from methods_world import PRESETS

    config_io.check(config_io.load([PRESETS.parent / "tradeoff.yaml"]))


class Step:
    """The loss of a step that is under way until somebody waits for it."""

    ended = False

    def block_until_ready(self):
        self.ended = True
        return self

    def __float__(self):
        return 0.5


@pytest.mark.parametrize(("seconds", "shown"), [(1e9, [20, 25]), (-1.0, list(range(1, 26)))])
def test_one_step_is_under_way_at_a_time_and_a_slow_one_is_shown(monkeypatch, seconds, shown):
    begun, seen, polled = [], [], []

    def supervised_step(params, opt_state, *_, **__):
        assert all(step.ended for step in begun[:-1])
        begun.append(Step())
        return params, opt_state, begun[-1]

    monkeypatch.setattr(warmup, "supervised_step", supervised_step)
    monkeypatch.setattr(warmup, "SHOW_SECONDS", seconds)
    run = warmup.WarmUp(
        settings=resolve(Config()).warmup,
        batches=lambda step, practice: (None, None),
        spec=SPEC,
        tx=None,
        params={},
        opt_state=None,
        on_progress=lambda step, planned, loss: seen.append(step),
        poll=lambda: polled.append(len(begun)),
        saved=None,
        planned=25,
    )
    run.advance(25, lambda i: 1e-3)
    assert len(begun) == 25 and seen == shown and polled == list(range(1, 26))


def test_the_temperature_of_rollouts_changes_neither_a_warm_up_nor_its_fingerprint(tmp_path):
    warm, prints = [], []
    for temperature in ("1", "0.5"):
        keys = ("warmup.target_accuracy=0", "warmup.short_accuracy=0", "warmup.hold_accuracy=0")
        config = load(tmp_path, None, *keys, "warmup.steps=3", f"rollout.temperature={temperature}")
        settings = resolve(config).warmup
        policy = make_policy(resolve(config).policy, load_method(resolve(config).method), 27)
        prints.append(warmup_fingerprint(config))
        params = warmup.warm_up(
            settings, prints[-1], policy, tmp_path / temperature,
            batches=warmup.ledger_batches(settings), styles=(), accuracy_of=lambda *_: 0.0,
            on_progress=lambda *_: None, poll=None,
        )  # fmt: skip
        warm.append(jax.tree.map(np.array, params))
    assert prints[0] == prints[1]
    jax.tree.map(np.testing.assert_array_equal, *warm)


class OfTable:
    """The warm-up of a small model on a table with traces."""

    def __init__(self, folder):
        self.folder = folder
        self.write("=4")
        spec = f"jsonl:{folder}/own.jsonl"
        self.config = load(
            folder, None, f"data.train={spec}", f"data.eval=['{spec}']", "data.num_groups=1",
            "data.prompt_format=characters", "data.trace_column=cot", "warmup.steps=3",
            "warmup.target_accuracy=0", "warmup.hold_accuracy=0", f"warmup.dir={folder}/warm",
        )  # fmt: skip

    def write(self, trace):
        row = f'{{"question": "2+2", "answer": "4", "cot": "{trace}"}}\n'
        (self.folder / "own.jsonl").write_text(row)

    def train(self, poll=None):
        """Runs the warm-up on the traces that the table has now."""
        settings = resolve(self.config)
        tokenizer = own_tokenizer(self.config.data)
        task_data = build_task_data(settings.task, tokenizer, len(tokenizer))
        data = initialize._warmup_data(settings.warmup, task_data)
        return warmup.warm_up(
            settings.warmup, warmup_fingerprint(self.config),
            make_policy(settings.policy, load_method(settings.method), len(tokenizer)),
            self.folder / "warm", batches=data.batches, styles=(), accuracy_of=lambda *_: 0.0,
            on_progress=lambda *_: None, poll=poll, texts_digest=data.texts_digest,
        )  # fmt: skip


OTHER_TEXTS = "warmup.dir=.*/warm contains a warm-up with other traces or answers than data.train"


def test_a_finished_warm_up_on_other_traces_is_refused(tmp_path):
    world = OfTable(tmp_path)
    trained = world.train()
    jax.tree.map(np.testing.assert_array_equal, trained, world.train())
    world.write("2+2=4")
    with pytest.raises(UserError, match=OTHER_TEXTS) as refusal:
        world.train()
    assert len(refusal.value.lines) == 1


def test_an_unfinished_warm_up_on_other_traces_is_refused(tmp_path):
    world, steps = OfTable(tmp_path), []

    def stop_after_two():
        steps.append(len(steps))
        if len(steps) == 2:
            raise Preempted("SIGTERM")

    with pytest.raises(Preempted):
        world.train(stop_after_two)
    world.write("2+2=4")
    with pytest.raises(UserError, match=OTHER_TEXTS):
        world.train()
    world.write("=4")
    continued = []
    world.train(lambda: continued.append(1))
    assert len(continued) == 1
