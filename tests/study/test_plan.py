"""The runs of a study: their names, what they share, what they cost."""

import functools
import json
import shutil
from pathlib import Path

import pytest

from bacr_jax import evaluate
from bacr_jax.config import Config
from bacr_jax.config.training_checks import dense_problems
from bacr_jax.errors import UserError
from bacr_jax.runs.folder import RunPaths, WarmupPaths
from bacr_study.archive import CELLS, archived_cells, read_compressed, unpack
from bacr_study.archive import RESULTS as RESULTS_FILE
from bacr_study.cells import Cell, evaluated
from bacr_study.configured import held_out_budgets, held_out_warnings
from bacr_study.plan import (
    find_run,
    folder_of,
    plan_runs,
    settings_digest,
)
from bacr_study.spec import Variant
from bacr_study.study_file import read_study
from bacr_study.work import evaluation_of
from study_world import STUDY, finished, planned

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGES = Path(__file__).parents[2] / "docs" / "studies"


def test_votes_have_no_runs_of_their_own_and_seeds_are_outermost(tmp_path):
    _, runs, _ = planned(tmp_path)
    assert [run.id for run in runs] == [
        "plain.grpo.0",
        "plain.bacr.0",
        "plain.grpo.1",
        "plain.bacr.1",
    ]


def test_arms_of_one_seed_share_a_warmup_and_other_seeds_and_models_do_not(tmp_path):
    _, runs, folder = planned(tmp_path)
    grpo, bacr, other, _ = (run.warmup for run in runs)
    assert grpo == bacr != other
    assert grpo.parent == folder.parent / "warmups"
    _, runs, _ = planned(tmp_path, size="wide")
    assert runs[0].warmup == grpo and runs[2].warmup not in (grpo, other)


def test_seeds_share_the_warmup_of_warmup_seed(tmp_path):
    _, runs, _ = planned(tmp_path, "warmup.seed=5")
    assert len({run.warmup for run in runs}) == 1
    assert runs[0].warmup.name.startswith("5-")
    assert len({run.folder for run in runs}) == 4


def test_equal_settings_are_one_run_whatever_the_arm_is_called(tmp_path):
    twin = "  twin: {label: again, set: {loss.entropy_coef: 0.0}}\nsizes:"
    _, runs, _ = planned(tmp_path, "seeds=[0]", text=STUDY.replace("sizes:", twin, 1))
    grpo, bacr, twin = runs
    assert twin.folder == bacr.folder != grpo.folder
    # So are those of another study below the same folder.
    _, others, _ = planned(tmp_path, "seeds=[0]", "title=Other")
    assert others[1].folder == bacr.folder
    # A run with another seed, or with one other key, is another.
    _, others, _ = planned(tmp_path, "seeds=[0]", "train.steps=3")
    assert others[1].folder != bacr.folder


def test_what_a_study_would_not_honour_is_refused(tmp_path):
    for key, value in (
        ("warmup.dir=shared", "null"),
        ("grader=mine.py:score", "null"),
        ("output.log_every=30", "1"),
    ):
        with pytest.raises(UserError, match=rf"^plain, grpo: {key}: .*; set it to {value}(,|$)"):
            planned(tmp_path, key)
    with pytest.raises(UserError, match=r"reward.weights, .* `bacr evaluate --compare`$"):
        planned(tmp_path, "grader=mine.py:score")
    planned(tmp_path, "output.log_every=1")


def test_a_run_knows_what_is_there(tmp_path):
    _, (run, *_), _ = planned(tmp_path)
    assert not run.warmed_up and not run.trained
    identity = WarmupPaths(run.warmup).identity
    identity.parent.mkdir(parents=True)
    identity.write_text("{}")
    summary = RunPaths(run.folder).summary
    summary.parent.mkdir(parents=True)
    summary.write_text("{}")
    assert run.warmed_up and run.trained


def test_a_run_is_named_by_number_or_id(tmp_path):
    _, runs, _ = planned(tmp_path)
    assert find_run(runs, "2") is find_run(runs, "plain.grpo.1") is runs[2]
    for text in ("4", "-1", "plain.vote.0", ""):
        with pytest.raises(
            UserError,
            match="has this number or id; use a number from 0 to 3, or an id that --list prints",
        ):
            find_run(runs, text)


def test_what_train_would_refuse_names_the_arm(tmp_path):
    with pytest.raises(UserError, match="^plain, grpo: .*budget.max"):
        planned(tmp_path, "budget.max=4")


FOLDER = Path(__file__).parents[2] / "configs" / "studies"
STUDIES = sorted(FOLDER.glob("*.yaml"))
OF_STUDIES = pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem == "main" else pytest.mark.slow)
        for path in STUDIES
    ],
)


@functools.cache
def shipped(path):
    study = read_study(path, overrides=["seeds=[0]"])
    return plan_runs(study, folder_of(study, Path("studies")))


@OF_STUDIES
def test_every_run_of_the_shipped_studies_has_a_good_config(path):
    runs = shipped(path)
    assert runs and len({run.id for run in runs}) == len(runs)
    assert all(run.tokens is not None for run in runs)


# Runs of this study are runs of `main`, whose committed cells have other held-out budgets.
SHARED_WITH_MAIN = {"stable-ledger"}


@OF_STUDIES
def test_a_new_study_measures_held_out_accuracy_at_its_budgets(path):
    study = read_study(path)
    if (RESULTS / f"{path.stem}-cpu").exists() or path.stem in SHARED_WITH_MAIN:
        return
    for (task_id, _), budgets in held_out_budgets(shipped(path)).items():
        assert list(held_out_warnings(study.task(task_id), [budgets])) == []


def test_full_bacr_of_the_ablation_is_the_main_study_s_robust_preset():
    main, ablation = (
        {run.id: run.folder for path in STUDIES if path.stem == name for run in shipped(path)}
        for name in ("main", "ablation")
    )
    assert ablation["tradeoff.bup+cas+tdr+bcae.0"] == main["tradeoff.bacr-full.0"]


def test_a_run_has_its_cells_with_those_of_the_votes_over_it(tmp_path):
    study, (run, *_), _ = planned(tmp_path, "seeds=[0]")
    assert not run.has_cells(study)
    finished(study, run, run.variant)
    # A kill, or an arm added later.
    assert not run.has_cells(study)
    finished(study, run, Variant("vote"))
    assert run.has_cells(study)
    # What a config says is what counts: a key at its default says nothing.
    assert settings_digest(Config()) == settings_digest(Config(seed=Config().seed))
    assert settings_digest(Config(seed=5)) != settings_digest(Config())
    finished(study, run, Variant("vote"), config_sha="0123")
    with pytest.raises(UserError, match="other settings than the study has now .digest: 0123"):
        run.has_cells(study)


@pytest.mark.parametrize("says", [True, False], ids=["says how", "of an earlier version"])
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("evaluation={samples: 3, size: 10}", "samples: 2 then, 3 now"),
        ("evaluation={samples: 2, size: 9}", "size: 10 then, 9 now"),
        (
            "tasks={plain: {label: p, config: [base.yaml], budgets: [8]}}",
            r"budgets: \[8, 64\] then",
        ),
        ("evaluation={samples: 2, size: 10, temperature: 0.3}", "temperature: 1.0 then, 0.3 now"),
    ],
)
def test_a_cell_evaluated_otherwise_is_refused(tmp_path, override, words, says):
    study, (run, *_), _ = planned(tmp_path, "seeds=[0]", "arms=[grpo]")
    finished(study, run, run.variant, evaluation=study.asked("plain", "grpo") if says else {})
    assert run.has_cells(study)
    other, (run, *_), _ = planned(tmp_path, "seeds=[0]", "arms=[grpo]", override)
    if not says and "temperature" in override:
        # Its numbers do not tell.
        assert run.has_cells(other)
        return
    with pytest.raises(
        UserError, match=f"were made with other settings .*{words}.*; move the study's folder away"
    ):
        run.has_cells(other)


OF_FOUR = STUDY.replace("samples: 2", "samples: 4")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("votes: 4", "votes: 2 then, 4 now"),
        (
            "votes: 2, accounting: matched_total",
            "accounting: per_sample then, matched_total now",
        ),
    ],
)
def test_a_vote_that_was_counted_otherwise_is_refused(tmp_path, change, words):
    study, (run, *_), _ = planned(tmp_path, "seeds=[0]", text=OF_FOUR)
    for variant in (run.variant, Variant("vote")):
        finished(study, run, variant, evaluation=run.asked(study, variant))
    assert run.has_cells(study)
    changed = OF_FOUR.replace("votes: 2", change)
    other, (run, *_), _ = planned(tmp_path, "seeds=[0]", text=changed)
    with pytest.raises(UserError, match=rf"vote\.0\.json: .* other settings .*{words}"):
        run.has_cells(other)
    # Cells of earlier versions do not tell how votes were counted.
    finished(study, run, Variant("vote"), evaluation=study.asked("plain", "grpo"))
    assert run.has_cells(other)


STARTED = STUDY.replace(
    "arms:\n", "before: start\narms:\n  start: {label: S, set: {train.steps: 0}}\n"
)
# Each is asked for at truncation points: `bacr` reads its budget, `start` is the arm `before`.
DENSE = "evaluation.cut_every=4"
SWAP = "evaluation.swap=true"


def of_arm(folder, arm, overrides, text=STARTED):
    """Returns a study with other overrides, and its run of an arm."""
    study, runs, _ = planned(folder, "seeds=[0]", "arms=[start,grpo,bacr]", *overrides, text=text)
    return study, next(run for run in runs if run.variant.arm == arm)


@pytest.mark.parametrize(
    ("arm", "then", "now", "words"),
    [
        ("bacr", [], [SWAP], "swap: False then, True now"),
        ("bacr", [SWAP], [], "swap: True then, False now"),
        ("start", [], [DENSE], "cut_every: None then, 4 now"),
        ("start", [DENSE], [], "cut_every: 4 then, None now"),
        ("start", [DENSE], ["evaluation.cut_every=8"], "cut_every: 4 then, 8 now"),
        ("start", [DENSE, "before=grpo"], [DENSE], "cut_every: None then, 4 now"),
    ],
)
def test_a_cell_with_other_truncation_points_is_refused(tmp_path, arm, then, now, words):
    study, run = of_arm(tmp_path, arm, then)
    finished(study, run, run.variant, evaluation=run.asked(study, run.variant))
    assert run.has_cells(study)
    other, run = of_arm(tmp_path, arm, now)
    with pytest.raises(UserError, match=f"were made with other settings .*{words}"):
        run.has_cells(other)
    if not then:
        # So is a cell of an earlier version, which lists no settings at all.
        finished(study, run, run.variant)
        with pytest.raises(UserError, match=f"were made with other settings .*{words}"):
            run.has_cells(other)


@pytest.mark.parametrize(
    ("arm", "now"), [("grpo", SWAP), ("grpo", DENSE), ("start", SWAP), ("bacr", DENSE)]
)
def test_truncation_points_of_other_arms_do_not_matter(tmp_path, arm, now):
    study, run = of_arm(tmp_path, arm, [])
    finished(study, run, run.variant, evaluation=run.asked(study, run.variant))
    other, run = of_arm(tmp_path, arm, [now])
    assert run.has_cells(other)
    # Cells of earlier versions contain the settings of all arms.
    finished(other, run, run.variant, evaluation=other.asked("plain", arm))
    assert run.has_cells(other) and run.has_cells(study)


@pytest.mark.parametrize(
    ("arm", "options"), [("grpo", []), ("bacr", ["--swap"]), ("start", ["--every", "4"])]
)
def test_a_run_is_evaluated_at_the_truncation_points_of_its_arm(tmp_path, arm, options):
    study, run = of_arm(tmp_path, arm, [SWAP, DENSE])
    arguments, _ = evaluation_of(study, run)
    assert [text for text in arguments if text in ("--swap", "--every", "4")] == options


# `bacr` is the only one of these methods with a budget embedding.
@pytest.mark.parametrize(
    ("keys", "is_swapped"),
    [
        ("method: bacr", True),
        ("method: bacr, conditioning.budget_input: prompt", True),
        ("method: bacr, conditioning.budget_input: none", False),
        *((f"method: {name}, cuts.count: 1", False) for name in ("grpo", "rloo", "dler")),
        # Its budget is a tag in the response.
        ("method: selfbudgeter, cuts.count: 1", False),
    ],
)
def test_a_swap_is_evaluated_if_the_policy_receives_its_budget(tmp_path, keys, is_swapped):
    text = STARTED.replace("loss.entropy_coef: 0.0", keys)
    study, run = of_arm(tmp_path, "bacr", [SWAP], text)
    arguments, _ = evaluation_of(study, run)
    assert ("--swap" in arguments) == is_swapped
    # A cell of an earlier version that was evaluated with --swap nevertheless is still used.
    finished(study, run, run.variant, evaluation=study.asked("plain", "bacr"))
    assert run.has_cells(study)


@pytest.mark.parametrize(
    "override",
    [
        *("evaluation.samples=0", "evaluation.samples=35", "evaluation.top_p=1"),
        *("evaluation.size=1", "evaluation.size=2147483647", "evaluation.temperature=0.001"),
        *("evaluation.slots=1", "evaluation.slots=1000000", "evaluation.seed=4294967295"),
        *("evaluation.cut_every=1", "evaluation.cut_every=63", SWAP),
    ],
)
def test_what_a_study_accepts_its_evaluations_accept(tmp_path, override):
    arms = "arms=[start,grpo,bacr]"
    study, runs, _ = planned(tmp_path, "seeds=[0]", arms, override, text=STARTED)
    for run in runs:
        arguments = evaluate.parse(evaluation_of(study, run)[0])
        config = evaluate.settle(arguments, run.config)
        assert list(dense_problems(config.eval)) == []


def page_of(path):
    """Returns the text of a study's own page, or of another page that names the study's file."""
    own = PAGES / f"{path.stem}.md"
    if own.exists():
        return own.read_text()
    texts = [page.read_text() for page in sorted(PAGES.glob("*.md"))]
    [text] = [text for text in texts if f"`configs/studies/{path.name}`" in text]
    return text


@OF_STUDIES
def test_committed_results_are_those_of_the_shipped_study(path, tmp_path):
    """What only a run's speed depends on may have changed since they were made."""
    folder = RESULTS / f"{path.stem}-cpu"
    if not folder.exists():
        # A study is written down before it is run, and its page states this until then. The page of
        # a study that was stopped early states which arms were not run.
        was_stopped = any(RESULTS.glob(f"{path.stem}-*unfinished"))
        assert ("were not run" if was_stopped else "Not yet run") in page_of(path)
        return
    cells = archived_cells(folder)
    made = {cell["id"]: cell["config_sha"] for cell in cells}
    study = read_study(path)
    for cell in (Cell(**cell) for cell in cells):
        arm = study.arm(cell.arm)
        asked = study.asked(cell.task, arm.of or arm.id)
        found = evaluated(cell, asked)
        assert found == {name: asked[name] for name in found} and (found or arm.of)
    copy = folder_of(study, tmp_path)
    copy.mkdir()
    shutil.copy(folder / CELLS, copy)
    unpack(copy)
    runs = plan_runs(study, copy)
    votes = {arm.id for arm in study.arms if arm.of is not None}
    trained = {cell["id"] for cell in cells if cell["arm"] not in votes}
    now = {run.id: run.digest for run in runs}
    # A run that could not be made is missing, and the page says so.
    missing = set(now) - trained
    assert {name: now[name] for name in trained} == {name: made[name] for name in trained}
    assert {run.id for run in runs if run.has_cells(study)} == trained
    assert not missing or "has no runs" in page_of(path)
    # Tables and pictures are of all of them.
    results = json.loads(read_compressed(folder / RESULTS_FILE))
    assert set(results["cells"]) == set(made) and set(results["missing"]) == missing
