"""What a finished run shows, and that nothing it shows can cost its results."""

from bacr_jax.config import Config
from bacr_jax.runs.folder import RunFolder
from bacr_jax.runs.metrics import MetricsWriter
from bacr_jax.training.publish import evaluation_numbers, publish, trace_rows
from report_world import TRACE, WHOLE_TRACE, entry, make_whole_run


class Recorder(MetricsWriter):
    """A writer that only remembers what it was given."""

    def __init__(self):
        self.given, self.closed = [], False

    def show(self, step, **what):
        self.given.append((step, what))

    def close(self):
        self.closed = True


def shown(folder, again=False):
    metrics = Recorder()
    publish(RunFolder(folder, None), Config(), metrics, 12, again=again)
    assert metrics.closed
    return metrics.given


def test_accuracies_are_named_by_set_decoding_and_budget():
    sets = {"math500:x.jsonl": {"greedy": {"512": entry(0.5), "none": entry(0.75)}}}
    assert evaluation_numbers(sets) == {
        "eval/math500/greedy/512": 0.5, "eval/math500/greedy/512/tokens": 9.0,
        "eval/math500/greedy/none": 0.75, "eval/math500/greedy/none/tokens": 9.0,
    }  # fmt: skip


def test_a_row_has_the_last_answer_and_its_verdict():
    table = trace_rows([TRACE, WHOLE_TRACE])
    old, new = [dict(zip(table.columns, row)) for row in table.rows]
    assert new["right"] is True and new["outcomes"] == 1.0 and new["decided_by"] == "symbolic"
    assert (new["level"], new["told"], new["segment_advantages"]) == (2, 8, "[0.75, -0.125]")
    # A trace of an older version has empty places.
    assert old["gold"] == "" and old["right"] is True and list(old) == list(new)


def test_boards_get_the_pictures_and_the_traces_of_a_finished_run_once(tmp_path):
    folder = make_whole_run(tmp_path / "run")
    (first, pictures), (last, traces) = shown(folder)
    assert first == last == 12 and "training" in pictures["pictures"]
    assert len(traces["traces"].rows) == 96
    assert (folder / "report.html").exists()
    assert shown(folder, again=True) == []


def test_a_damaged_trace_costs_a_warning(tmp_path, capsys):
    folder = make_whole_run(tmp_path / "run")
    (folder / "rollouts" / "000012.jsonl").write_text("{}\n")
    ((_, what),) = shown(folder)
    assert "training" in what["pictures"]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all(line.startswith("warning: ") for line in said)
    assert all("000012.jsonl: holds something else than traces" in line for line in said)
