"""An evaluation as a job: checked before any work, drawn in batches, summed up from its samples."""

import io
import json

import numpy as np
import pytest

from bacr_jax.errors import UserError
from bacr_jax.evaluation import job, served
from bacr_jax.evaluation.folder import in_one_call, open_evaluation
from bacr_jax.evaluation.job import write_labels
from bacr_jax.evaluation.samples import GREEDY, SAMPLED
from bacr_jax.parallel.preemption import Preempted
from bacr_jax.questions import loaders
from bacr_jax.questions.groups import groups_from_solve_rate, read_solve_rates
from bacr_jax.runs.progress import Progress
from bacr_jax.runs.saved_policy import SavedPolicy
from evaluation_world import drawn, sample
from methods_world import CHANGES
from small_config import small_config

OVERRIDES = ("eval.budgets=[8, 12]", "eval.samples=4", "eval.size=3", "rollout.slots=2")


@pytest.fixture(autouse=True)
def few_problems(monkeypatch):
    monkeypatch.setattr(loaders, "LEDGER_TEST_SIZE", 20)


@pytest.fixture
def saved(tmp_path):
    """A policy of which only the settings are looked at."""

    def make(*overrides, name="one"):
        config = small_config(tmp_path, CHANGES, *OVERRIDES, *overrides)
        return SavedPolicy(tmp_path / name, 5, config, {"run": name})

    return make


@pytest.fixture
def policy(monkeypatch):
    """In place of a policy: answers by row, so that no two problems are alike."""

    class Fake:
        left, right = 10**6, "4"

        def draw(self, decoder, questions, chosen, parts, drawing, **options):
            if self.left == 0:
                raise Preempted("SIGTERM")
            self.left -= 1
            return [self.part(questions, chosen, *part, **options) for part in parts]

        def part(self, questions, chosen, rows, settings, **options):
            (setting,) = settings
            ids = questions.set.ids
            return [
                sample(0, int(row % setting.samples), self.right if row % 3 else "1",
                       set=options["name"], id=ids[chosen[row // setting.samples]],
                       budget=setting.budget, mode=setting.mode, text=f"row {row}")
                for row in rows
            ]  # fmt: skip

    fake = Fake()
    monkeypatch.setattr(served, "open_decoder", lambda *arguments, **options: None)
    monkeypatch.setattr(job, "draw_samples", fake.draw)
    return fake


def evaluate(work, out, stream=None, poll=None):
    says = io.StringIO() if stream is None else stream
    with Progress(stream=says) as progress, open_evaluation(out, work.settings):
        return job.run(work, out, progress, poll)


class TestPrepare:
    def test_settings_are_greedy_then_sampled_then_those_that_votes_need(self, saved):
        work = job.prepare(saved(), greedy=True, self_consistency=2)
        assert [(s.mode, s.budget, s.samples) for (s,) in work.eval_settings] == [
            (GREEDY, 8, 1),
            (GREEDY, 12, 1),
            (SAMPLED, 8, 4),
            (SAMPLED, 12, 4),
            # halves of 8 and 12
            (SAMPLED, 4, 4),
            (SAMPLED, 6, 4),
        ]
        assert work.settings["decoding"]["cells"] == {"greedy": [8, 12], "sampled": [8, 12, 4, 6]}

    def test_every_answer_is_in_one_batch(self, saved):
        work = job.prepare(saved(), greedy=True)
        keys = [key for batch in work.batches() for key in batch.keys]
        assert len(keys) == len(set(keys)) == 3 * 2 * (1 + 4)
        # Batches of four times the rows that are decoded together.
        assert max(len(batch.rows) for batch in work.batches()) == 8
        assert work.name == "one, step 5"

    def test_what_samples_depend_on_is_the_same_for_the_same_and_only_then(self, saved):
        settings = lambda *overrides: job.prepare(saved(*overrides), greedy=True).settings
        first = settings()
        assert json.loads(json.dumps(first)) == first == settings()
        assert settings("eval.size=2")["sets"] != first["sets"]
        assert (
            settings("seed=3")["sets"]["ledger"]["questions"]
            != (first["sets"]["ledger"]["questions"])
        )
        assert settings("rollout.slots=1")["decoding"] != first["decoding"]

    def test_the_policy_is_recorded_with_its_weights(self, saved, monkeypatch):
        recorded = {"run": "one", "weights": "abc"}
        monkeypatch.setattr(SavedPolicy, "recorded_identity", lambda self: recorded)
        assert job.prepare(saved(), greedy=True).settings["policy"] == recorded

    @pytest.mark.parametrize(
        ("overrides", "options", "says"),
        [
            ((), {"self_consistency": 9}, "at budget 8 there is less than one token for each"),
            ((), {"labels": True}, "from one data set at one budget"),
            (("eval.budgets=[100000]",), {}, "answer together; use a smaller number"),
            ((), {"compare": True}, "contains no evaluation"),
        ],
    )
    def test_what_does_not_fit_together_is_refused(self, saved, tmp_path, overrides, options, says):
        places = {"labels": tmp_path / "labels.jsonl", "compare": [tmp_path]}
        options = {key: places.get(key, value) for key, value in options.items()}
        with pytest.raises(UserError, match=says):
            job.prepare(saved(*overrides), greedy=True, **options)


class TestRun:
    def test_results_are_those_of_the_samples(self, saved, policy, tmp_path):
        work = job.prepare(saved(), greedy=False)
        results = evaluate(work, tmp_path / "out")
        assert results == json.loads((tmp_path / "out" / "results.json").read_text())
        entry = results["sets"]["ledger"]["by_budget"]["sampled"]["8"]
        # Of twelve rows every third is wrong.
        assert entry["accuracy"] == pytest.approx(8 / 12)
        assert (entry["problems"], entry["samples"]) == (3, 4)
        assert results["name"] == "one, step 5" and results["comparisons"] == {}

    def test_one_that_was_stopped_draws_only_what_is_missing(
        self, saved, policy, tmp_path, monkeypatch
    ):
        work = job.prepare(saved(), greedy=True)
        evaluate(work, tmp_path / "whole")
        calls = list(in_one_call(work.batches(), 16))
        assert [sum(len(batch.rows) for batch in call) for call in calls] == [14, 16]
        monkeypatch.setattr(job, "_WAVES_OF_A_CALL", 8)
        policy.left = 1
        with pytest.raises(Preempted):
            evaluate(work, tmp_path / "out")
        assert not (tmp_path / "out" / "results.json").exists()
        policy.left = len(calls) - 1
        evaluate(work, tmp_path / "out")
        assert policy.left == 0
        for name in ("samples.jsonl", "results.json"):
            parts = [(tmp_path / folder / name).read_bytes() for folder in ("out", "whole")]
            assert parts[0] == parts[1]
        # A finished one draws nothing.
        evaluate(work, tmp_path / "out")

    def test_a_signal_is_heard_while_answers_are_compared_for_votes(self, saved, policy, tmp_path):
        def poll():
            raise Preempted("SIGTERM")

        work = job.prepare(saved(), greedy=False)
        # The policy of this test calls none itself.
        with pytest.raises(Preempted):
            evaluate(work, tmp_path / "out", poll=poll)
        policy.left = 0
        assert evaluate(work, tmp_path / "out")["sets"]

    def test_two_policies_are_compared_and_called_by_different_names(self, saved, policy, tmp_path):
        first = job.prepare(saved(), greedy=True, name="mine")
        evaluate(first, tmp_path / "first")
        policy.right = "1"
        for name, called in (("better", "mine"), ("mine", str(tmp_path / "first"))):
            second = job.prepare(
                saved(name="two"), greedy=True, compare=[tmp_path / "first"], name=name
            )
            results = evaluate(second, tmp_path / name)
            entry = results["comparisons"][called]["ledger"]["by_budget"]["greedy"]["12"]
            # Of three rows the first is always wrong.
            assert entry["difference"] == pytest.approx(-2 / 3)
            assert (entry["accuracy"], entry["other_accuracy"]) == (0, pytest.approx(2 / 3))

    @pytest.mark.parametrize(
        "override", ["eval.temperature=0.3", "eval.top_p=0.5", "rollout.answer_tokens=3"]
    )
    def test_an_evaluation_with_another_decoding_is_refused(
        self, saved, policy, tmp_path, override
    ):
        evaluate(job.prepare(saved(override), greedy=False), tmp_path / "first")
        for how in ({"compare": [tmp_path / "first"]}, {"free": tmp_path / "first"}):
            with pytest.raises(UserError, match="run one of them again with the options of the"):
                job.prepare(saved(name="two"), greedy=False, **how)

    def test_budgets_of_votes_are_not_compared(self, saved, policy, tmp_path):
        first = job.prepare(saved(), greedy=False, self_consistency=2, name="one")
        one = evaluate(first, tmp_path / "first")
        part = policy.part

        def right_where_reported(questions, chosen, rows, settings, **options):
            policy.right = "4" if settings[0].budget in (8, 12) else "1"
            return part(questions, chosen, rows, settings, **options)

        policy.part = right_where_reported
        folder = tmp_path / "first"
        second = job.prepare(
            saved(name="two"), greedy=False, self_consistency=2, compare=[folder], free=folder
        )
        two = evaluate(second, tmp_path / "second")
        anytime, other = (results["sets"]["ledger"]["anytime"]["sampled"] for results in (two, one))
        difference = two["comparisons"]["one"]["ledger"]
        assert list(difference["by_budget"]["sampled"]) == ["8", "12"]
        anytime_difference = difference["anytime"]["sampled"]
        assert anytime_difference["budgets"] == anytime["budgets"] == [8, 12]
        expected = anytime["mean"] - other["mean"]
        assert anytime_difference["mean_difference"] == pytest.approx(expected)
        free = two["free_curve"]["sets"]["ledger"]["sampled"]
        assert list(free["by_budget"]) == ["8", "12"]

    def test_the_split_is_recorded_unless_it_is_the_test_split(self, saved, policy, tmp_path):
        tested = job.prepare(saved(), greedy=True)
        trained = job.prepare(saved(), greedy=True, split="train")
        assert "split" not in tested.settings
        assert evaluate(trained, tmp_path / "out")["settings"]["split"] == "train"

    @pytest.mark.parametrize(
        ("name", "content", "says"),
        [
            ("results.json", {"sets": {}}, "is missing or damaged; run the bacr evaluate"),
            ("results.json", {"sets": {"ledger": {}}}, "is missing or damaged; run"),
            ("evaluation.json", {}, "does not contain all settings"),
        ],
    )
    def test_what_is_damaged_is_not_compared_with(
        self, saved, policy, tmp_path, name, content, says
    ):
        evaluate(job.prepare(saved("eval.budgets=[8]"), greedy=True), tmp_path / "first")
        (tmp_path / "first" / name).write_text(json.dumps(content))
        with pytest.raises(UserError, match=f"{name} {says}"):
            job.prepare(saved("eval.budgets=[8]"), greedy=True, compare=[tmp_path / "first"])

    @pytest.mark.parametrize("votes", [None, 2])
    def test_difficulty_is_measured_on_the_way(self, saved, policy, tmp_path, votes):
        labels = tmp_path / "labels.jsonl"
        work = job.prepare(
            saved("eval.budgets=[8]"), greedy=False, labels=labels, self_consistency=votes
        )
        evaluate(work, tmp_path / "out", said := io.StringIO())
        rates = [json.loads(line)["avg"] for line in labels.read_text().splitlines()]
        # Rows 0 to 3, 4 to 7 and 8 to 11, wrong at 0, 3, 6 and 9.
        assert rates == [0.5, 0.75, 0.75]
        assert "solve rate above .5, up to .75: 2 problems" in said.getvalue()
        assert "difficulty labels in " in said.getvalue()


# 4, 3, 2, 1 and 0 of 4 samples right
ROWS = [["4"] * right + ["1"] * (4 - right) for right in (4, 3, 2, 1, 0)]


def test_each_problem_gets_the_share_of_its_samples_that_are_right(tmp_path):
    counts = write_labels(tmp_path / "labels.jsonl", drawn(ROWS))
    lines = [json.loads(line) for line in (tmp_path / "labels.jsonl").read_text().splitlines()]
    assert lines[1] == {"id": "p1", "avg": 0.75, "samples": 4}
    assert [line["avg"] for line in lines] == [1.0, 0.75, 0.5, 0.25, 0.0]
    # A rate on a threshold belongs to the harder group.
    assert counts == {
        "above .75": 1,
        "above .5, up to .75": 1,
        "above .25, up to .5": 1,
        "up to .25": 2,
    }


def test_what_is_written_is_what_data_groups_reads(tmp_path):
    counts = write_labels(tmp_path / "labels.jsonl", drawn(ROWS))
    rates = read_solve_rates(tmp_path / "labels.jsonl", ["p4", "p0"])
    np.testing.assert_array_equal(rates, [0.0, 1.0])
    every = read_solve_rates(tmp_path / "labels.jsonl", [f"p{i}" for i in range(5)])
    sizes = np.bincount(groups_from_solve_rate(every, num_groups=4), minlength=4)
    assert list(counts.values()) == sizes.tolist()


def test_a_file_that_can_not_be_written_is_one_line(tmp_path):
    with pytest.raises(UserError, match="nowhere/labels.jsonl: the file can't be written"):
        write_labels(tmp_path / "nowhere" / "labels.jsonl", drawn(ROWS))
