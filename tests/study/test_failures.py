"""Failed runs are counted against the policy that they started from."""

import dataclasses

import pytest
from scipy.stats import binom

from bacr_study.cells import Grid, correct_digits
from bacr_study.failures import (
    ACCURACY,
    CLOSED,
    FOUND,
    changes_of,
    failure_rates,
    policy_before,
    worst_change,
)
from bacr_study.results import build_results
from bacr_study.spec import Arm, Variant
from bacr_study.statistics import clopper_pearson_interval
from bacr_study.tables import tables_of
from cells_world import made_task, main_study, make_cell

STUDY = main_study(
    tasks=(made_task("ledger", "Ledger"),),
    arms=(Arm("cot", "After the warm-up"), Arm("anytime", "Anytime"), Arm("bacr_paper", "BACR")),
    seeds=(0, 1),
    reference=("anytime",),
    before="cot",
    views=("accuracy",),
)
PROBLEMS = 100


def cell(arm, seed, *, right=50, unanswered=0.0, at_16=None):
    """A cell with as many right answers of 100 at every budget, or others at budget 16."""
    made = make_cell(STUDY, "ledger", Variant(arm), seed, problems=PROBLEMS, samples=1, steps=10)
    for modes in made.sets.values():
        for budgets in modes.values():
            for budget, entry in budgets.items():
                count = at_16 if at_16 is not None and budget == "16" else right
                entry["accuracy"] = count / PROBLEMS
                entry["correct"] = correct_digits([1] * count + [0] * (PROBLEMS - count))
                entry["no_answer_share"] = unanswered
    return made


def failures(after, before):
    return [
        (change.budget, change.measure)
        for change in changes_of(after, before, "test")
        if change.failed
    ]


def test_an_accuracy_fails_below_the_interval_of_before():
    # Wilson's 95 % interval of 50 in 100 is [.4038, .5962].
    before = cell("cot", 0)
    assert failures(cell("anytime", 0, right=41), before) == []
    assert failures(cell("anytime", 0, at_16=40), before) == [("16", ACCURACY)]
    assert failures(cell("anytime", 0, right=100), before) == []


def test_answers_found_fail_below_95_percent_unless_they_were_so_before():
    complete = cell("cot", 0)
    assert failures(cell("anytime", 0, unanswered=0.05), complete) == []
    after = cell("anytime", 0, unanswered=0.06)
    assert failures(after, complete) == [(budget, FOUND) for budget in after.sets["test"]["greedy"]]
    # Wilson's 95 % interval of 90 in 100 is [.8256, .9448].
    incomplete = cell("cot", 0, unanswered=0.10)
    assert failures(cell("anytime", 0, unanswered=0.17), incomplete) == []
    assert len(failures(cell("anytime", 0, unanswered=0.18), incomplete)) == 5


def test_a_loss_is_shown_by_problems_and_not_by_the_interval():
    # The five budgets share a level of .025, so each has .005: (1/2)^8 < .005 < (1/2)^7.
    before = cell("cot", 0)
    for right, shown in ((43, False), (42, True)):
        losses = list(changes_of(cell("anytime", 0, at_16=right), before, "test"))
        assert [change.budget for change in losses if change.shown] == ["16"] * shown
        assert not any(change.failed for change in losses)
    # Ten problems lost and nine won: more changed, and the loss is not shown.
    mixed = cell("anytime", 0)
    for entry in mixed.sets["test"]["greedy"].values():
        entry["correct"] = correct_digits([0] * 10 + [1] * 49 + [0] * 41)
    assert not any(change.shown for change in changes_of(mixed, before, "test"))
    unclosed = changes_of(cell("anytime", 0, unanswered=0.06), before, "test")
    assert all(change.shown == (change.measure == FOUND) for change in unclosed)


def with_closed_rate(one, rate):
    for entry in one.sets["test"]["greedy"].values():
        entry["closed_rate"] = rate
    return one


def test_closed_answers_count_instead_of_answers_found_if_both_cells_have_them():
    after = with_closed_rate(cell("anytime", 0), 0.5)
    assert failures(after, cell("cot", 0)) == []
    measures = {measure for _, measure in failures(after, with_closed_rate(cell("cot", 0), 1.0))}
    assert measures == {CLOSED}
    without = with_closed_rate(cell("anytime", 0, unanswered=0.5), 1.0)
    assert failures(without, with_closed_rate(cell("cot", 0), 1.0)) == []
    assert {measure for _, measure in failures(without, cell("cot", 0))} == {FOUND}


def grid(*cells):
    return Grid(STUDY, {one.id: one for one in cells})


def test_runs_count_once_however_many_budgets_fail():
    made = grid(
        *(cell("cot", seed) for seed in (0, 1)),
        *(cell("anytime", seed) for seed in (0, 1)),
        cell("bacr_paper", 0, right=60, at_16=0),
        cell("bacr_paper", 1, right=30),
    )
    rates = failure_rates(made, STUDY.tasks[0])
    assert set(rates) == {"anytime", "bacr_paper"}
    assert (rates["anytime"]["failed"], rates["anytime"]["runs"]) == (0, 2)
    bacr = rates["bacr_paper"]
    assert (rates["anytime"]["shown"], bacr["shown"]) == (0, 2)
    assert (bacr["failed"], bacr["runs"], len(bacr["failures"])) == (2, 2, 1 + 5)
    worst = {"seed": 0, "budget": "16", "measure": ACCURACY, "before": 0.5, "after": 0.0}
    assert bacr["worst"] == worst


@pytest.mark.parametrize("ruined_seed", [0, 1])
def test_a_run_without_answers_is_the_worst_even_if_another_loses_more_accuracy(ruined_seed):
    made = grid(
        *(cell("cot", seed) for seed in (0, 1)),
        cell("anytime", ruined_seed, right=45, unanswered=1.0),
        cell("anytime", 1 - ruined_seed, right=30),
    )
    worst = {"seed": ruined_seed, "budget": "8", "measure": FOUND, "before": 1.0, "after": 0.0}
    results = build_results(made.cells, STUDY)
    assert results["failures"]["ledger"]["anytime"]["worst"] == worst
    tables = {table.name: table.markdown() for table in tables_of(results, STUDY)}
    for name in ("failures", "accuracy"):
        assert f"answers found 100.0 to 0.0 at 8, seed {ruined_seed}" in tables[name]


def test_answers_found_that_do_not_fail_are_not_the_worst_change():
    changes = changes_of(cell("anytime", 0, right=49, unanswered=0.05), cell("cot", 0), "test")
    assert worst_change(changes).measure == ACCURACY


def test_a_run_without_greedy_answers_to_the_main_set_is_not_counted():
    sampled = cell("anytime", 1)
    del sampled.sets["test"]["greedy"]
    made = grid(*(cell("cot", seed) for seed in (0, 1)), cell("anytime", 0), sampled)
    assert failure_rates(made, STUDY.tasks[0])["anytime"]["runs"] == 1


def on(machine, one):
    return dataclasses.replace(one, provenance={"machine": machine})


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_run_is_compared_with_a_policy_of_its_machine_if_there_is_one(seed, reverse):
    starts = [on("first", cell("cot", 0)), on("second", cell("cot", 0, right=90))]
    for start in starts:
        run = on(start.provenance["machine"], cell("anytime", seed))
        untrained = starts[::-1] if reverse else starts
        assert policy_before(run, untrained, shared_warmup=True) is start
    elsewhere = on("third", cell("anytime", seed))
    assert policy_before(elsewhere, starts, shared_warmup=True) is starts[0]
    # Without a shared warm-up, another seed starts from another policy.
    expected = starts[0] if seed == 0 else None
    assert policy_before(elsewhere, starts, shared_warmup=False) is expected


def test_on_one_machine_a_policy_of_the_same_seed_comes_first():
    starts = [cell("cot", 0), cell("cot", 1), on("second", cell("cot", 1))]
    run = cell("anytime", 1)
    assert policy_before(run, starts, shared_warmup=True) is starts[1]


@pytest.mark.parametrize(("machines", "other"), [(("a", "a"), 0), (("a", "b"), 1), (("b", "b"), 2)])
def test_the_caption_counts_the_comparisons_between_machines(machines, other):
    made = grid(
        *(on("a", cell("cot", seed)) for seed in (0, 1)),
        *(on(machine, cell("anytime", seed, right=0)) for seed, machine in enumerate(machines)),
        on("a", cell("bacr_paper", 0)),
    )
    results = build_results(made.cells, STUDY)
    rate = results["failures"]["ledger"]["anytime"]
    assert (rate["failed"], rate["runs"], rate["other_machine"]) == (2, 2, other)
    (table,) = (table for table in tables_of(results, STUDY) if table.name == "failures")
    assert (f"{other} of 3 runs are compared" in table.caption) == (other > 0)
    assert ("another machine" in table.caption) == (other > 0)


def test_a_run_whose_start_is_unknown_is_not_counted():
    made = grid(cell("cot", 0), cell("anytime", 0), cell("anytime", 1, right=0))
    assert failure_rates(made, STUDY.tasks[0])["anytime"]["runs"] == 1
    without = dataclasses.replace(STUDY, before="")
    assert failure_rates(dataclasses.replace(made, study=without), STUDY.tasks[0]) == {}
    alone = grid(cell("anytime", 0))
    assert failure_rates(alone, STUDY.tasks[0]) == {}


def test_runs_from_a_shared_warmup_are_compared_with_one_cell_of_the_same_problems():
    cells = (cell("cot", 0), cell("anytime", 1, right=0))
    shared = dataclasses.replace(STUDY.tasks[0], set={"warmup.seed": 0})
    rates = failure_rates(grid(*cells), shared)["anytime"]
    assert (rates["failed"], rates["runs"]) == (1, 1)
    elsewhere = dataclasses.replace(cells[0], problems_digest={"test": "others"})
    assert failure_rates(grid(elsewhere, *cells[1:]), shared) == {}


def test_tables_show_failures_beside_the_means():
    cells = [cell("cot", 0), cell("anytime", 0), cell("bacr_paper", 0, at_16=0)]
    results = build_results({one.id: one for one in cells}, STUDY)
    tables = {table.name: table.markdown() for table in tables_of(results, STUDY)}
    assert "50.0 to 0.0 at 16, seed 0" in tables["failures"]
    assert "1 of 1 | 100.0 [2.5, 100.0] | 1 of 1" in tables["failures"]
    accuracy = tables["accuracy"].splitlines()
    assert any("BACR" in line and "1 of 1 [2, 100]" in line for line in accuracy)
    assert "greedy answers" in accuracy[-1]
    assert any("After the warm-up" in line and " - |" in line for line in accuracy)


@pytest.mark.parametrize(("events", "trials"), [(0, 20), (2, 11), (6, 6), (1, 1)])
def test_the_ends_of_clopper_pearson_leave_a_fortieth_on_each_side(events, trials):
    low, high = clopper_pearson_interval(events, trials)
    if events:
        assert binom.sf(events - 1, trials, low) == pytest.approx(0.025)
    else:
        assert low == 0.0
    if events < trials:
        assert binom.cdf(events, trials, high) == pytest.approx(0.025)
    else:
        assert high == 1.0


def test_clopper_pearson_of_no_failure_in_twenty():
    # 1 - .025^(1/20)
    assert clopper_pearson_interval(0, 20)[1] == pytest.approx(0.16843, abs=1e-5)
