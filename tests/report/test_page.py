"""report.html holds everything of a run in one file, and runs nothing that a model wrote."""

import base64
import copy
import hashlib
import json
import re

import numpy as np
import pytest

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.errors import UserError
from bacr_jax.evaluation.decline import CLOSED, Decline
from bacr_jax.report import page as pages
from bacr_jax.report import plots
from bacr_jax.report.page import try_report, write_comparison, write_report
from bacr_jax.report.run_data import read_run
from bacr_jax.training.limited_updates import LimitedUpdates
from report_world import HOSTILE, entry, evaluation, lines, make_whole_run


def page(folder):
    """What `write_report` writes, without drawing pictures."""
    return pages.page([read_run(folder)])


def write_page(folder, records):
    """Returns the report of a run with these evaluations."""
    lines(folder / "eval.jsonl", records)
    return page(folder)


def decline(mode, budget, before, after, is_shown=True):
    """Returns a decline of closed answers, as in summary.json."""
    return Decline(mode, budget, CLOSED, before, after, 100, is_shown)._asdict()


@pytest.fixture
def whole(tmp_path):
    return make_whole_run(tmp_path / "whole")


def test_nothing_is_loaded_from_elsewhere_and_nothing_hostile_gets_through(run, whole):
    for folder in (run, whole):
        found = page(folder)
        own = found.replace(plots.library(), "")
        data = own.count('<script type="application/json">')
        assert own.count("<script") == own.count("</script>") == 1 + data
        assert data and "&lt;script&gt;" in own
        assert not re.findall(r"https?:|@import|url\(| src=| on\w+=| style=", own)
        assert re.findall(r"<link[^>]*>", found) == ['<link rel="icon" href="data:,">']


def test_only_this_style_and_this_script_may_run(whole):
    found = page(whole)
    (rules,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', found)
    assert "default-src 'none'" in rules and "unsafe" not in rules
    # Descriptions of charts are data, which no browser runs.
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", found, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in rules


def test_pictures_stay_beside_it(run):
    assert write_report(run).read_text() == page(run)
    names = {path.stem for path in run.glob("*.png")}
    light = {"training", "budgets", "accuracy_ledger", "evaluation_ledger"}
    assert names == light | {f"{name}-dark" for name in light}


def test_the_page_of_a_long_run_is_below_two_megabytes(whole):
    rng = np.random.default_rng(0)
    names = [f"reward/cut_{i}" for i in range(1, 12)] + ["reward/mean", "policy/entropy"]
    names += [f"budget/{name}_{i}" for name in ("p10", "median", "p90") for i in range(5)]
    names += [f"curriculum/pass_rate_{i}" for i in range(5)]
    names += ["budget/mean", "rollout/thinking_mean", "mismatch/k3", "time/tokens_per_s"]
    rows = rng.random((2000, len(names)))
    records = [{"step": i, **dict(zip(names, row.tolist()))} for i, row in enumerate(rows, 1)]
    lines(whole / "metrics.jsonl", records)
    assert len(page(whole).encode()) < 2e6


def test_a_run_under_way_has_a_report_too(run):
    lines(run / "eval.jsonl", [evaluation(0, "before", 0.2)])
    (run / "metrics.jsonl").unlink()
    found = page(run)
    assert "not finished" in found and "30.0 [20.0, 40.0]" in found


def test_a_finished_run_says_so(run):
    summary = {"method": "BACR", "steps": 3, "generated_tokens": 1234, "wall_seconds": 61.0}
    (run / "summary.json").write_text(json.dumps(summary))
    found = page(run)
    assert "finished, 3 steps" in found and "1,234" in found and "1m01s" in found


def test_the_saving_of_score_weights_stands_beside_the_mean_advantage(run):
    """Means of the later half of the steps; a run of an older version has neither."""
    assert "mean advantage" not in page(run)
    steps = [(0.9, -1.0), (0.9, -1.0), (0.125, 0.25), (0.375, 0.5)]
    records = [
        {"step": i + 1, "score/predicted_saving": saving, "advantage/mean": mean}
        for i, (saving, mean) in enumerate(steps)
    ]
    lines(run / "metrics.jsonl", records)
    found = page(run)
    assert "25.0%" in found and "+0.375" in found
    assert found.index("score weights save, predicted") < found.index("mean advantage")


def test_validation_questions_stand_after_test_sets_and_are_marked(run):
    whens = [(0, "before", 0.2), (2, "during", 0.5), (3, "after", 0.6)]
    records = [evaluation(*when) for when in whens]
    for record in records:
        record["sets"]["train_holdout"] = record["sets"]["ledger"]
    lines(run / "eval.jsonl", records)
    found = write_report(run).read_text()
    marked = found.index("train_holdout (validation, not a test set): accuracy in %")
    assert marked > found.index("Ledger: accuracy in %")
    assert (run / "evaluation_train_holdout.png").exists()


def test_sets_are_called_as_people_call_them(whole):
    found = page(whole)
    assert "<h3>MATH-500</h3>" in found and "math500:data" not in found.partition("config.yaml")[0]


def test_everything_that_was_measured_has_a_chart(whole):
    titles = re.findall(r'<figcaption>([^<]*)</figcaption>(?!<p class="note">)', page(whole))
    for title in (
        "Accuracy by budget",
        "Accuracy by tokens used",
        "Completion",
        "Accuracy given completion",
        "Requested and used",
        "Accuracy during training",
    ):
        assert {f"{title}, {mode}" for mode in ("greedy", "sampled")} <= set(titles)
    assert {"Reward", "Sampler and learner", "Value calibration", "Pace"} <= set(titles)
    assert {"Time of a step by phase", "Scheduled location of budgets"} <= set(titles)
    assert "Sampled budgets, difficulty group 2" in titles


def test_the_first_screen_says_what_came_out(run):
    """A sentence, the numbers before and after, and the chart stand before all else."""
    lines(run / "eval.jsonl", [evaluation(0, "before", 0.2), evaluation(3, "after", 0.45)])
    first = page(run).partition("<h2>Overview</h2>")[2].partition("<h3>In short</h3>")[0]
    said = (
        "Accuracy rose at 8, 16 and fell at no budget (outside the 95 % interval of before, greedy)"
    )
    assert f"{said}; thinking tokens at 16 went from 9.0 to 9.0." in first
    assert "20.0 [10.0, 30.0],\n9.0 tok" in first and "45.0 [35.0, 55.0],\n9.0 tok" in first
    # The chart comes first, across the page.
    assert first.index("Accuracy by budget, greedy</figcaption>") < first.index("<table>")
    assert '<figure class="chart across"><figcaption>Accuracy by budget, greedy' in first
    assert "Worse than before training" not in first
    lines(run / "eval.jsonl", [evaluation(0, "before", 0.2)])
    assert "nothing to compare with yet" in page(run)


def test_the_first_sentence_says_where_a_run_ended_worse_than_it_began(run):
    worse = evaluation(3, "after", 0.45)
    worse["sets"]["ledger"]["greedy"]["16"]["accuracy"] = 0.0
    lines(run / "eval.jsonl", [evaluation(0, "before", 0.2), worse])
    worst = "greedy at 16: accuracy 30.0 to 0.0 % (shown by an exact test)"
    decline = f"Worse than before training on Ledger: {worst}."
    assert f"{decline} Accuracy rose at 8 and fell at 16" in page(run)
    best = {"step": 2, "accuracy": 0.5, "set": "ledger", "worst": None, "declines": []}
    (run / "summary.json").write_text(json.dumps({"best": best}))
    chosen = "The best checkpoint is step 2 (mean accuracy 50.0 % on Ledger); export, evaluate,"
    assert f"{decline} {chosen} generate and serve take it. Accuracy rose" in page(run)


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("name", ["ledger", "gsm8k:test.jsonl", "train_holdout"])
def test_the_first_sentence_has_declines_of_every_set_and_mode(run, name, mode, is_finished):
    records = [evaluation(0, "before", 0.2), evaluation(3, "after", 0.2)]
    for record in records:
        summary = record["sets"]["ledger"]
        summary["sampled"] = copy.deepcopy(summary["greedy"])
        for other in ("gsm8k:test.jsonl", "train_holdout"):
            record["sets"][other] = copy.deepcopy(summary)
    assert "Worse than before training" not in write_page(run, records)
    records[1]["sets"][name][mode]["8"]["closed_rate"] = 0.5
    if is_finished:
        worse = {one: [] for one in records[1]["sets"]}
        worse[name] = [decline(mode, "8", 1.0, 0.5)]
        (run / "summary.json").write_text(json.dumps({"declines": worse}))
    title = {"ledger": "Ledger", "gsm8k:test.jsonl": "GSM8K"}.get(name, f"{name} (validation, ")
    lead = re.findall('<p class="lead">(.*?)</p>', write_page(run, records))[0]
    assert lead.startswith(f"Worse than before training on {title}")
    assert f": {mode} at 8: closed answers 100.0 to 50.0 % (shown by an exact test). Accur" in lead


def test_the_first_sentence_marks_declines_that_may_be_chance(run):
    worse = [decline("greedy", str(budget), 1.0, 0.5, False) for budget in (8, 16)]
    worse.append(decline("sampled", "8", 0.9, 0.4))
    (run / "summary.json").write_text(json.dumps({"declines": {"ledger": worse}}))
    closed = "closed answers 100.0 to 50.0 %"
    assert (
        "Worse than before training on Ledger: "
        "sampled at 8: closed answers 90.0 to 40.0 % (shown by an exact test); "
        f"greedy at 8: {closed}; greedy at 16: {closed} "
        "(may be chance with 100 questions). Accuracy rose"
    ) in page(run)


@pytest.mark.parametrize("kind", LimitedUpdates._fields)
def test_facts_count_the_limited_updates_of_each_kind(run, kind):
    (run / "summary.json").write_text(json.dumps({"steps": 3, "limited_updates": {kind: 0}}))
    assert f"updates {kind}" not in page(run)
    (run / "summary.json").write_text(json.dumps({"steps": 3, "limited_updates": {kind: 2}}))
    facts = page(run).partition("<h3>In short</h3>")[2].partition("</table>")[0]
    assert re.search(rf"updates {kind}</td>\s*<td[^>]*>in 2 of 3 steps</td>", facts)


def test_a_saving_is_compared_with_the_policy_before_training_cut_early(run):
    name = "before, cut at smaller budgets"
    assert name not in page(run)
    before = evaluation(0, "before", 0.2)
    curve = {"4": entry(0.1, 4), "8": entry(0.15, 8)}
    dense = {"greedy": {"budget": 16, "curve": curve, "area": 0.1, "area_ci95": [0.0, 0.2]}}
    before["dense"] = {"ledger": dense}
    lines(run / "eval.jsonl", [before, evaluation(3, "after", 0.45)])
    assert name in page(run)


def test_departures_are_folded_to_their_number(run):
    config = config_io.override(Config(), ["method=grpo"])
    (run / "config.yaml").write_text(config_io.to_yaml(config))
    title = "5 settings depart from the method&#39;s publication"
    assert f"<details><summary>{title}</summary>" in page(run)


def test_departures_from_the_publication_are_listed_also_while_it_trains(run):
    config = config_io.override(Config(), ["method=grpo", "loss.kl_kind=k3"])
    (run / "config.yaml").write_text(config_io.to_yaml(config))
    found = page(run)
    assert "loss.aggregate=constant (published: seq_mean_token_mean)" in found
    assert "loss.kl_kind=k3 (published" not in found
    (run / "summary.json").write_text(json.dumps({"departures": ["a key of its own"]}))
    assert "a key of its own" in page(run)


def test_what_is_odd_in_a_later_evaluation_is_said_of_its_file(run):
    results = run / "evaluation" / "step-000006" / "results.json"
    results.parent.mkdir(parents=True)
    results.write_text('{"name": "x", "sets": []}')
    with pytest.raises(
        UserError, match=rf"^{results} does not contain the results of an evaluation"
    ):
        page(run)


@pytest.mark.parametrize("name", ["config.yaml", "evaluation/results.json"])
def test_no_report_is_written_over_a_file_of_the_run(run, name):
    path = run / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    before = path.read_bytes()
    with pytest.raises(UserError, match=f"--out {path}: this is a data file of the run,"):
        write_report(run, path)
    assert path.read_bytes() == before


def test_a_report_that_fails_costs_no_result(run, capsys, monkeypatch):
    def fail(runs):
        raise RuntimeError("no such font\nand more")

    monkeypatch.setattr(pages, "page", fail)
    try_report(run)
    assert capsys.readouterr().err == (
        f"warning: {run / 'report.html'}: can't be written (no such font)\n"
    )


class TestComparison:
    def folders(self, tmp_path):
        one = make_whole_run(tmp_path / "a")
        return [one, make_whole_run(tmp_path / "b", gain=0.4, method="grpo")]

    def test_one_page_has_both_runs_in_every_chart(self, tmp_path):
        found = write_comparison(self.folders(tmp_path), ["mine", HOSTILE], None).read_text()
        (legend,) = re.findall(r"greedy</figcaption>\n<ul[^>]*>(.*?)</ul>", found)[:1]
        # They began as the same policy.
        assert re.findall(r"</span>(.*?)</li>", legend) == [
            "before", "mine", "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;",
        ]  # fmt: skip
        assert "<script>alert" not in found
        # 60 % and 80 % after training at 128 tokens
        assert "60.0 [50.0, 70.0]" in found and "80.0 [70.0, 90.0]" in found

    def test_each_run_that_ended_worse_has_a_line_before_the_results(self, tmp_path):
        folders = self.folders(tmp_path)
        title = "is worse than before training"
        shown = " (shown by an exact test)."
        assert title not in write_comparison(folders, [], None).read_text()
        spec = "math500:data/test.jsonl"
        path = folders[1] / "summary.json"
        worse = {spec: [decline("sampled", "64", 1.0, 0.5)], "ledger": []}
        path.write_text(json.dumps({**json.loads(path.read_text()), "declines": worse}))
        path = folders[0] / "summary.json"
        worse = {spec: [], "ledger": [decline("greedy", "8", 0.9, 0.0)]}
        path.write_text(json.dumps({**json.loads(path.read_text()), "declines": worse}))
        found = write_comparison(folders, ["<mine>", "b"], None).read_text()
        overview = found.partition("<h2>Overview</h2>")[2]
        leads = [
            f"&lt;mine&gt; {title} on Ledger: greedy at 8: closed answers 90.0 to 0.0 %{shown}",
            f"b {title} on MATH-500: sampled at 64: closed answers 100.0 to 50.0 %{shown}",
        ]
        assert re.findall('<p class="lead">(.*?)</p>', overview) == leads
        assert overview.index(leads[1]) < overview.index("<figcaption>")

    def test_it_says_in_what_the_runs_differ(self, tmp_path):
        found = write_comparison(self.folders(tmp_path), [], None).read_text()
        differing = found.partition("Settings that differ")[2].partition("</table>")[0]
        cells = re.findall(r"<td[^>]*>(.*?)</td>", differing)
        assert cells[:3] == ["method", "bacr", "grpo"] and "output.dir" not in cells
        # What came out stands first.
        assert found.index("<figcaption>Accuracy") < found.index("Settings that differ")

    def test_many_settings_are_folded_and_written_as_yaml(self, tmp_path):
        one, two = self.folders(tmp_path)
        keys = "eval: {budgets: [7, 9], size: 7, every: 3}\noutput: {report: false}\n"
        keys += "seed: 7\ntrain: {steps: 7}\nbudget: {min: 7, max: 77}\n"
        (two / "config.yaml").write_text(keys)
        found = write_comparison([one, two], [], None).read_text()
        assert re.search(r"<details><summary>Settings that differ: 8</summary>", found)
        cells = re.findall(r"<td[^>]*>(.*?)</td>", found.partition("Settings that differ")[2])
        assert {"[7, 9]", "false", "null"} <= set(cells)

    def test_rewards_that_count_different_things_are_not_to_be_compared(self, tmp_path):
        one, two = self.folders(tmp_path)
        found = write_comparison([one, two], [], None).read_text()
        said = "Rewards are not comparable here, only accuracies: runs differ in method."
        # In the overview and above the charts of training.
        assert found.count(said) == 2
        (two / "config.yaml").write_text((one / "config.yaml").read_text())
        assert said not in write_comparison([one, two], [], None).read_text()

    def test_policies_that_began_otherwise_are_not_given_one_beginning(self, tmp_path):
        one, two = self.folders(tmp_path)
        text = (two / "eval.jsonl").read_text()
        (two / "eval.jsonl").write_text(text.replace('"accuracy": 0.3,', '"accuracy": 0.31,'))
        found = write_comparison([one, two], [], None).read_text()
        assert "</span>before</li>" not in found

    @pytest.mark.parametrize(("difference", "is_drawn"), [(0.0, True), (0.01, False)])
    @pytest.mark.parametrize("has_dense_curve", [0, 1])
    def test_the_policy_cut_early_is_drawn_if_all_runs_began_with_it(
        self, tmp_path, difference, is_drawn, has_dense_curve
    ):
        folders = self.folders(tmp_path)
        spec = "math500:data/test.jsonl"
        for index, folder in enumerate(folders):
            records = [json.loads(line) for line in (folder / "eval.jsonl").open()]
            records[0]["sets"][spec]["greedy"]["64"]["accuracy"] += difference * index
            if index == has_dense_curve:
                curve = {"32": entry(0.1, 32), "64": entry(0.15, 64)}
                records[0]["dense"] = {spec: {"greedy": {"budget": 256, "curve": curve}}}
            lines(folder / "eval.jsonl", records)
        found = write_comparison(folders, [], None).read_text()
        assert ("before, cut at smaller budgets" in found) == is_drawn
        assert ("</span>before</li>" in found) == is_drawn

    def test_runs_with_different_sets_stand_beside_each_other(self, tmp_path):
        one = make_whole_run(tmp_path / "a")
        two = make_whole_run(tmp_path / "b", spec="gsm8k:x.jsonl")
        found = write_comparison([one, two], [], tmp_path / "both.html").read_text()
        assert "<h3>MATH-500</h3>" in found and "<h3>GSM8K</h3>" in found

    def test_runs_without_results_yet_can_be_compared(self, tmp_path, run):
        one = make_whole_run(tmp_path / "a")
        (run / "eval.jsonl").unlink()
        (run / "metrics.jsonl").unlink()
        assert "not finished" in write_comparison([one, run], [], None).read_text()

    @pytest.mark.parametrize(
        ("folders", "labels", "said"),
        [
            ("ab", ["x"], "1 names for 2 runs"),
            ("ab", ["x", "x"], "--label x was passed twice"),
            ("aa", [], "was passed twice"),
        ],
    )
    def test_what_can_not_be_told_apart_is_refused(self, tmp_path, folders, labels, said):
        with pytest.raises(UserError, match=said):
            write_comparison([tmp_path / name for name in folders], labels, None)
