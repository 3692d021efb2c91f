"""The samples in a folder are an evaluation's state: what is whole stays, what is torn goes."""

import dataclasses
import json

import pytest

from bacr_jax.errors import UserError
from bacr_jax.evaluation.folder import (
    RESULTS,
    SAMPLES,
    SETTINGS,
    SPLIT,
    append,
    default_folder,
    evaluations_after,
    find_evaluation,
    finished_evaluations,
    open_evaluation,
    read_samples,
    read_settings,
    recorded_prompt_date,
    resume,
    sample_batches,
    settings_name_of,
)
from bacr_jax.evaluation.samples import GREEDY, SAMPLED, EvalSetting
from bacr_jax.runs.folder import RunFolder, RunPaths
from evaluation_world import sample

TWO_EACH = EvalSetting(SAMPLED, 8, 2)
# Two problems, two samples each, drawn three and one.
WORK = sample_batches({"ours": ["p0", "p1"]}, [[TWO_EACH]], 3)
ASKED = {
    "sets": {"ours": {"problems": 2}},
    "decoding": {"cells": {SAMPLED: [8]}, "budgets": [8], "samples": 2},
}
DRAWN = [[sample(0, 0, "4"), sample(0, 1, "1"), sample(1, 0, "4")], [sample(1, 1, "4")]]


WRONGLY_TYPED = {"thinking_tokens": "many", "correct": "yes", "cut": "x", "extracted": 4, "id": 7}


@pytest.fixture
def half(tmp_path):
    """A folder with the first batch."""
    with open_evaluation(tmp_path / "out", ASKED):
        append(tmp_path / "out", DRAWN[0])
    return tmp_path / "out"


def resumed(path, work=WORK):
    with open_evaluation(path, ASKED):
        return resume(path, work)


def test_batches_go_set_by_set_and_setting_by_setting():
    greedy = EvalSetting(GREEDY, 4, 1)
    work = sample_batches({"a": ["x", "y"], "b": ["z"]}, [[greedy], [TWO_EACH]], 3)
    assert [(batch.set, *batch.settings, batch.rows.tolist()) for batch in work] == [
        ("a", greedy, [0, 1]),
        ("a", TWO_EACH, [0, 1, 2]),
        ("a", TWO_EACH, [3]),
        ("b", greedy, [0]),
        ("b", TWO_EACH, [0, 1]),
    ]
    assert work[1].keys == [
        ("a", SAMPLED, 8, None, *place) for place in (("x", 0), ("x", 1), ("y", 0))
    ]


def test_all_cuts_of_a_trace_are_in_one_batch():
    cuts = [EvalSetting(SAMPLED, 8, 2, cut) for cut in (3, 8)]
    first, second = sample_batches({"a": ["x", "y"]}, [cuts], 3)
    assert first.rows.tolist() == [0, 1, 2] and second.rows.tolist() == [3]
    assert first.keys[:3] == [
        ("a", SAMPLED, 8, 3, "x", 0),
        ("a", SAMPLED, 8, 8, "x", 0),
        ("a", SAMPLED, 8, 3, "x", 1),
    ]


class TestResume:
    def test_a_new_folder_has_nothing(self, tmp_path):
        assert resumed(tmp_path / "out") == []
        assert read_settings(tmp_path / "out") == ASKED

    def test_whole_batches_are_there(self, half):
        assert resumed(half) == [DRAWN[0]]

    @pytest.mark.parametrize("torn", ['{"set": "ou', json.dumps(dataclasses.asdict(DRAWN[1][0]))])
    def test_a_torn_line_is_cut_off(self, half, torn):
        whole = (half / SAMPLES).read_bytes()
        with (half / SAMPLES).open("a") as file:
            file.write(torn)
        assert resumed(half) == [DRAWN[0]]
        assert (half / SAMPLES).read_bytes() == whole

    def test_so_is_a_batch_of_which_a_part_is_missing(self, half):
        lines = (half / SAMPLES).read_text().splitlines(keepends=True)
        (half / SAMPLES).write_text("".join(lines[:2]))
        assert resumed(half) == []
        assert (half / SAMPLES).read_bytes() == b""

    def test_samples_of_another_plan_are_refused_by_their_line(self, half):
        other = sample_batches({"ours": ["p0", "p2"]}, [[TWO_EACH]], 3)
        with pytest.raises(
            UserError, match=r"samples\.jsonl, line 3: this line contains the sample .*'p1'"
        ):
            resumed(half, other)

    def test_nothing_else_passes_for_a_sample(self, half):
        record = dataclasses.asdict(DRAWN[0][0])
        fewer = {name: value for name, value in record.items() if name != "gold"}
        typed = ({**record, name: value} for name, value in WRONGLY_TYPED.items())
        for wrong in ([1], {**record, "score": 1}, fewer, *typed):
            (half / SAMPLES).write_text(json.dumps(wrong) + "\n")
            with pytest.raises(UserError, match=r"line 1: this line is not a sample of an"):
                resumed(half)

    def test_texts_are_kept_on_the_disk_alone(self, tmp_path):
        # Half a surrogate pair can come out of a tokenizer.
        told = sample(0, 0, "4", text="caf\u00e9 \ud83d")
        with open_evaluation(tmp_path / "out", {}):
            append(tmp_path / "out", [told, sample(0, 1, "4")])
            (found,) = resume(tmp_path / "out", sample_batches({"ours": ["p0"]}, [[TWO_EACH]], 3))
        assert found[0].text == "" and found[0].key == told.key
        assert "caf\u00e9 ?" in (tmp_path / "out" / SAMPLES).read_text(encoding="utf-8")


class TestOpen:
    def test_the_same_settings_open_it_again_and_others_are_named(self, half):
        more = {"decoding": {"seed": 0, "budgets": [4, 8]}}
        with open_evaluation(half.parent / "two", more):
            pass
        changed = {"decoding": {"seed": 1, "budgets": [4, 8]}, "new": "x"}
        with (
            pytest.raises(
                UserError, match=r"decoding\.seed \(0 in the folder, 1 now\), new \(None in"
            ),
            open_evaluation(half.parent / "two", changed),
        ):
            pytest.fail("opened another evaluation's folder")
        # JSON has no tuples: settings are compared as they are written.
        with open_evaluation(half.parent / "two", {"decoding": {"seed": 0, "budgets": (4, 8)}}):
            assert read_settings(half.parent / "two") == more

    def test_another_tokenizer_or_template_is_refused(self, tmp_path):
        prints = lambda tokenizer: {"prompt_fingerprints": {"tokenizer": tokenizer}}
        with open_evaluation(tmp_path / "new", {"a": 1, **prints("x")}):
            pass
        with (
            pytest.raises(
                UserError, match=r"prompt_fingerprints.tokenizer \(x in the folder, y now\)"
            ),
            open_evaluation(tmp_path / "new", {"a": 1, **prints("y")}),
        ):
            pytest.fail("opened another evaluation's folder")

    @pytest.mark.parametrize(
        ("recorded", "now", "differs"),
        [
            # The config changed, and the checkpoint did not.
            ({}, {"run": "other"}, None),
            # Trained again with the same config.
            ({}, {"weights": "other"}, r"policy.weights \(w in the folder, other now\)"),
            ({}, {"run": "other", "model": "other"}, r"policy.model \(m in the folder, other now"),
            (
                {},
                {"step": 7, "weights": "other"},
                r"namely policy.step \(5 in .*, 7 now\); use --s",
            ),
            # A Hugging Face folder has nothing but its weights.
            ({"run": None, "method": None, "step": None, "model": None}, {}, r"policy.run \(None"),
        ],
    )
    def test_a_run_is_compared_by_its_weights(self, tmp_path, recorded, now, differs):
        policy = {"run": "r", "method": "bacr", "step": 5, "weights": "w", "model": "m"}
        entries = {name: value for name, value in (policy | recorded).items() if value is not None}
        with open_evaluation(tmp_path / "out", {"policy": entries}):
            pass
        again = open_evaluation(tmp_path / "out", {"policy": policy | now})
        if differs is None:
            with again:
                assert read_settings(tmp_path / "out") == {"policy": entries}
            return
        with pytest.raises(UserError, match=differs), again:
            pytest.fail("opened another evaluation's folder")

    def test_many_differences_are_counted(self, tmp_path):
        with open_evaluation(tmp_path / "out", dict.fromkeys("abcdef", 0)):
            pass
        with (
            pytest.raises(
                UserError, match=r"d \(0 in the folder, 1 now\) and 2 more; use --out .*/out-2"
            ),
            open_evaluation(tmp_path / "out", dict.fromkeys("abcdef", 1)),
        ):
            pytest.fail("opened another evaluation's folder")

    def test_a_folder_in_use_is_refused(self, half):
        with (
            open_evaluation(half, ASKED),
            pytest.raises(UserError, match="is in use by process"),
            open_evaluation(half, ASKED),
        ):
            pytest.fail("opened twice")

    def test_what_is_no_evaluation_is_left_alone(self, tmp_path):
        (tmp_path / "notes").mkdir()
        (tmp_path / "notes" / "a.txt").write_text("mine")
        for name, says in (
            ("notes", "contains no evaluation, but other files such as 'a.txt'"),
            ("notes/a.txt", "file"),
        ):
            with (
                pytest.raises(UserError, match=says),
                open_evaluation(tmp_path / name, {}),
            ):
                pytest.fail("opened")
        assert [path.name for path in (tmp_path / "notes").iterdir()] == ["a.txt"]

    def test_a_new_folder_without_a_sample_disappears_when_the_input_is_bad(self, tmp_path):
        with pytest.raises(UserError), open_evaluation(tmp_path / "out", {}):
            raise UserError("bad")
        assert not (tmp_path / "out").exists()

    def test_a_stop_or_a_sample_keeps_it(self, tmp_path, half):
        with pytest.raises(KeyboardInterrupt), open_evaluation(tmp_path / "new", {}):
            raise KeyboardInterrupt
        assert (tmp_path / "new" / SETTINGS).exists()
        with pytest.raises(UserError), open_evaluation(half, ASKED):
            raise UserError("bad")
        with pytest.raises(UserError), open_evaluation(tmp_path / "more", {"seed": 0}):
            append(tmp_path / "more", DRAWN[0])
            raise UserError("bad")
        assert (half / SAMPLES).exists() and (tmp_path / "more" / SAMPLES).exists()

    def test_the_split_is_compared(self, half, tmp_path):
        with (
            pytest.raises(UserError, match=r"split \(None in the folder, train now\)"),
            open_evaluation(half, {**ASKED, SPLIT: "train"}),
        ):
            pytest.fail("opened")
        with open_evaluation(tmp_path / "other", {**ASKED, SPLIT: "train"}):
            append(tmp_path / "other", DRAWN[0])
        with (
            pytest.raises(UserError, match=r"split \(train in the folder, None now\)"),
            open_evaluation(tmp_path / "other", ASKED),
        ):
            pytest.fail("opened")


class TestFinished:
    def test_samples_are_read_by_set_and_setting(self, half):
        with open_evaluation(half, ASKED):
            append(half, DRAWN[1])
        with pytest.raises(UserError, match="in this folder is not finished; run"):
            read_samples(half)
        (half / RESULTS).write_text("{}")
        assert read_samples(half) == {"ours": {TWO_EACH: [*DRAWN[0], *DRAWN[1]]}}
        lines = (half / SAMPLES).read_text().splitlines(keepends=True)
        for kept, says in ((3, "3 answers instead of 4; run"), (0, "0")):
            (half / SAMPLES).write_text("".join(lines[:kept]))
            with pytest.raises(
                UserError, match=f"For ours, sampled decoding and budget 8, the file has {says}"
            ):
                read_samples(half)
        (half / SAMPLES).write_text("".join([*lines, "{}\n"]))
        with pytest.raises(UserError, match="line 5: this line is not a sample"):
            read_samples(half)

    def test_answers_of_a_dense_curve_are_counted_cut_by_cut(self, half):
        dense = {**ASKED, "decoding": {**ASKED["decoding"], "every": 5}}
        (half / SETTINGS).write_text(json.dumps(dense))
        (half / RESULTS).write_text("{}")
        cut = [dataclasses.replace(s, cut=c) for s in sum(DRAWN, []) for c in (None, 5, 8)]
        (half / SAMPLES).unlink()
        append(half, cut)
        assert {s.cut for s in read_samples(half)["ours"]} == {None, 5, 8}

    @pytest.mark.parametrize(
        "settings", [{}, {"sets": {}}, {**ASKED, "sets": {"ours": 1}}, {**ASKED, "decoding": {}}]
    )
    def test_settings_that_say_no_rows_are_damaged(self, half, settings):
        (half / SETTINGS).write_text(json.dumps(settings))
        (half / RESULTS).write_text("{}")
        with pytest.raises(
            UserError, match=r"evaluation\.json does not contain all settings of an"
        ):
            read_samples(half)

    def test_settings_that_are_none_are_refused(self, tmp_path):
        with pytest.raises(UserError, match="does not contain an evaluation; run bacr"):
            read_settings(tmp_path)
        (tmp_path / SETTINGS).write_text("[]")
        with pytest.raises(UserError, match="does not contain the settings of an evaluation"):
            read_settings(tmp_path)


def evaluate(paths, step, settings_name=""):
    """Makes the folder of a checkpoint's evaluation."""
    folder = paths.evaluation_of(step, settings_name)
    folder.mkdir(parents=True)
    (folder / SETTINGS).write_text("{}")


class TestPlaces:
    def test_an_evaluation_that_goes_on_keeps_the_date_of_its_prompts(self, tmp_path):
        assert recorded_prompt_date(tmp_path / "none") == ""
        for settings, date in (
            ({"decoding": {"prompt_date": "2026-11-28"}}, "2026-11-28"),
            ({"decoding": {}}, ""),
            ({"decoding": {"prompt_date": 7}}, ""),
            ({}, ""),
        ):
            (tmp_path / SETTINGS).write_text(json.dumps(settings))
            assert recorded_prompt_date(tmp_path) == date

    def test_a_runs_evaluations_lie_in_the_run_by_their_steps(self, tmp_path):
        run, paths = tmp_path / "run", RunPaths(tmp_path / "run")
        assert default_folder(run, 20, None) == paths.evaluation_of(20)
        assert default_folder(run, 20, None, "size-4").name == "step-000020-size-4"
        tiny = tmp_path / "tiny"
        assert default_folder(None, None, tiny).name == "evaluation-tiny"
        assert default_folder(None, None, tiny, "budgets-8").name == "evaluation-tiny-budgets-8"
        for step in (100, 20):
            evaluate(paths, step)
        # The newest of them stands for the run, and an evaluation for itself.
        assert find_evaluation(run) == paths.evaluation_of(100)
        assert find_evaluation(paths.evaluation_of(20)) == paths.evaluation_of(20)
        assert finished_evaluations(run) == []
        (paths.evaluation_of(20) / RESULTS).write_text("{}")
        assert finished_evaluations(run) == [paths.evaluation_of(20) / RESULTS]

    def test_a_run_is_compared_by_the_evaluation_of_its_best_checkpoint(self, tmp_path):
        paths = RunPaths(tmp_path)
        for step in (20, 30):
            (paths.checkpoints / str(step)).mkdir(parents=True)
        best = {"step": 20, "accuracy": 0.5, "set": "train_holdout", "worst": None, "declines": []}
        paths.best.write_text(json.dumps(best))
        evaluate(paths, 30)
        with pytest.raises(
            UserError, match="best checkpoint of this run, step 20, was not evaluated; .*-000030"
        ):
            find_evaluation(tmp_path)
        evaluate(paths, 20)
        assert find_evaluation(tmp_path) == paths.evaluation_of(20)
        paths.best.unlink()
        assert find_evaluation(tmp_path) == paths.evaluation_of(30)

    def test_of_several_evaluations_the_one_with_the_same_settings_is_compared(self, tmp_path):
        paths = RunPaths(tmp_path)
        for name in ("size-9", "budgets-8"):
            evaluate(paths, 20, name)
        assert find_evaluation(tmp_path).name == "step-000020-budgets-8"
        assert find_evaluation(tmp_path, "size-9").name == "step-000020-size-9"
        evaluate(paths, 20)
        assert find_evaluation(tmp_path, "size-7").name == "step-000020"
        assert find_evaluation(tmp_path, "size-9").name == "step-000020-size-9"

    def test_evaluations_of_steps_that_a_run_went_back_from_are_set_aside(self, tmp_path):
        paths = RunPaths(tmp_path)
        for step in (20, 40):
            for name in ("", "budgets-8"):
                evaluate(paths, step, name)
        for name, policy in (("early", {"step": 20}), ("late", {"step": 40}), ("model", {})):
            (paths.later_evaluations / f"study-{name}").mkdir()
            settings = json.dumps({"policy": policy})
            (paths.later_evaluations / f"study-{name}" / SETTINGS).write_text(settings)
        for path in paths.later_evaluations.iterdir():
            (path / RESULTS).write_text("{}")
        (paths.later_evaluations / "2026-notes").mkdir()
        (paths.later_evaluations / "notes.txt").touch()
        abandoned = evaluations_after(tmp_path, 20)
        names = ["step-000040", "step-000040-budgets-8", "study-late"]
        assert [path.name for path in abandoned] == names
        (aside,) = RunFolder(tmp_path, None).set_aside(abandoned)
        assert sorted(path.name for path in aside.iterdir()) == names
        # Neither a report nor a comparison uses them any longer.
        assert {path.parent.name for path in finished_evaluations(tmp_path)} == {
            *("step-000020", "step-000020-budgets-8", "study-early", "study-model"),
        }
        assert find_evaluation(tmp_path) == paths.evaluation_of(20)
        assert paths.evaluations_of(40) == evaluations_after(tmp_path, 20) == []

    @pytest.mark.parametrize("step", [3, 1_000_000])
    @pytest.mark.parametrize("name", ["", "samples-1", "budgets-8-none-samples-4-and-greedy"])
    def test_the_name_of_the_settings_is_read_from_the_folder(self, tmp_path, step, name):
        assert settings_name_of(RunPaths(tmp_path).evaluation_of(step, name)) == name

    def test_a_folder_without_any_is_refused(self, tmp_path):
        with pytest.raises(
            UserError, match=f"--compare {tmp_path}: the folder contains no evaluation"
        ):
            find_evaluation(tmp_path)
