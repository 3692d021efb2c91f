"""Real references, public cases and hostile outputs of the shared data."""

import contextlib
import os
import random
import time
from pathlib import Path

import pytest

from bacr_grading import Grader, parse_reference, pool
from bacr_grading.compare import decide
from bacr_grading.extract import last_box
from bacr_grading.parsed_answer import read


def test_public_cases_follow_their_expected_verdict(grader, shared_rows):
    rows = [row for row in shared_rows("grader_cases.jsonl") if row["adopt"] is True]
    verdicts = grader.grade(
        [row["pred"] for row in rows], [row["gold"] for row in rows], mode="lenient"
    )
    wrong = [row for row, v in zip(rows, verdicts, strict=True) if v.correct != row["expected"]]
    assert len(wrong) <= 0.01 * len(rows), wrong


def test_a_library_bug_is_not_followed(grader, shared_rows):
    rows = [row for row in shared_rows("grader_cases.jsonl") if row["adopt"] is False]
    for row in rows:
        verdict = grader.grade([row["pred"]], [row["gold"]], mode="lenient")[0]
        assert verdict.correct != row["expected"]


@pytest.mark.parametrize("mode", ["strict", "lenient"])
def test_every_wrong_pair_is_wrong(grader, shared_rows, mode):
    rows = shared_rows("grader_wrong_pairs.jsonl")
    texts = [f"\\boxed{{{row['pred']}}}" for row in rows]
    verdicts = grader.grade(texts, [row["gold"] for row in rows], mode=mode)
    assert not any(verdict.correct for verdict in verdicts)


@pytest.mark.parametrize("mode", ["strict", "lenient"])
def test_every_hostile_case_returns_within_its_deadline(shared_rows, mode, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = shared_rows("grader_hostile.jsonl")
    starting, listen = 0.0, pool.WorkerPool._listen

    def listened(workers, *arguments):
        nonlocal starting
        began, ready = time.monotonic(), any(worker.ready for worker in workers._workers)
        listen(workers, *arguments)
        starting += 0.0 if ready else time.monotonic() - began

    monkeypatch.setattr(pool.WorkerPool, "_listen", listened)
    with Grader(workers=1, deadline=2.0) as grader:
        grader.grade(["\\boxed{x+1}"], ["1+x"])
        for row in rows:
            start, own, starting = time.monotonic(), time.process_time(), 0.0
            verdict = grader.grade([row["pred"]], [row["gold"]], mode=mode)[0]
            # Our own work is small, and each of a few readings has the deadline. How long a worker
            # that replaces a killed one takes to start is up to the machine's load.
            assert time.process_time() - own < 1.0, row["id"]
            assert time.monotonic() - start - starting < 2.0 + 8.0, row["id"]
            if row["expected"] is not None:
                assert verdict.correct == row["expected"], row["id"]
        assert grader.grade(["\\boxed{y+1}"], ["1+y"])[0].correct
        assert grader.counters()["internal_errors"] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # 8,792 rows, twice: half a minute
def test_gsm8k_references_grade_right_against_themselves_and_wrong_when_shuffled(shared_rows):
    for split, size in (("train", 7473), ("test", 1319)):
        rows = shared_rows(f"gsm8k/{split}.jsonl")
        assert len(rows) == size
        references = [row["answer"].rsplit("####", 1)[1].strip() for row in rows]
        with Grader(workers=1) as grader:
            own = grader.grade([f"<answer>{ref}</answer>" for ref in references], references)
            full = grader.grade([row["answer"] for row in rows], references, mode="lenient")
            shuffled = random.Random(0).sample(references, len(references))
            other = grader.grade([f"<answer>{ref}</answer>" for ref in shuffled], references)
        assert all(verdict.correct for verdict in own + full)
        numbers = [int(reference.replace(",", "")) for reference in references]
        theirs = [int(reference.replace(",", "")) for reference in shuffled]
        assert [v.correct for v in other] == [a == b for a, b in zip(numbers, theirs, strict=True)]


# One solution shows digits before its box, which then is a part of a number and no answer.
TOUCHED = r"355\boxed{680}"


# MATH-500 in seconds; the 7,500 rows of MATH train take a minute.
@pytest.mark.parametrize(
    ("name", "touched"),
    [pytest.param("math/train.jsonl", 1, marks=pytest.mark.slow), ("math500/test.jsonl", 0)],
)
def test_math_references_grade_right_against_themselves_and_their_solutions(
    shared_rows, name, touched
):
    rows = [row for row in shared_rows(name) if parse_reference(row["solution"])]
    references = [row.get("answer") or last_box(row["solution"]).content for row in rows]
    with Grader(workers=2) as grader:
        for mode in ("strict", "lenient"):
            own = grader.grade([f"\\boxed{{{ref}}}" for ref in references], references, mode=mode)
            full = grader.grade([row["solution"] for row in rows], references, mode=mode)
            assert all(verdict.correct for verdict in own)
            wrong = [row["solution"] for row, one in zip(rows, full) if not one.correct]
            assert len(wrong) == touched and all(TOUCHED in text for text in wrong)


def test_rewritten_math_lists_are_still_right(shared_rows):
    """The same answers in other spellings, so that equal strings can't be the reason."""
    parsed = [parse_reference(row["solution"]) for row in shared_rows("math/train.jsonl")]
    references = [ref.text for ref in parsed if ref and ref.kind == "list"]
    verdicts = []
    for text in references:
        spelled = text.replace("\\frac{", "\\dfrac {").replace(",", ",\\ ")
        spelled = spelled.replace("(", "\\left( ").replace(")", "\\right)")
        if spelled != text:
            verdicts.append(decide(read(spelled), read(text), lenient=False)[0])
    assert len(verdicts) > 300
    assert verdicts.count(True) == len(verdicts)


@pytest.mark.slow
def test_shuffled_math_references_are_wrong(shared_rows):
    """Whatever is right after the shuffle is the same answer in another spelling."""
    parsed = [parse_reference(row["solution"]) for row in shared_rows("math/train.jsonl")]
    texts = [reference.text for reference in parsed if reference]
    shuffled = random.Random(0).sample(texts, len(texts))
    # A timeout is a wrong answer too, and proves nothing; a busy machine makes them.
    with Grader(workers=2, deadline=60.0) as grader:
        verdicts = grader.grade([f"\\boxed{{{text}}}" for text in shuffled], texts)
        assert grader.counters()["timeouts"] == 0
    by_mathematics = [
        (a, b)
        for a, b, verdict in zip(shuffled, texts, verdicts, strict=True)
        if verdict.correct and verdict.path == "symbolic"
    ]
    assert by_mathematics == []
    by_rule = [
        (a, b)
        for a, b, verdict in zip(shuffled, texts, verdicts, strict=True)
        if verdict.correct and read(a).key != read(b).key
    ]
    for a, b in by_rule:
        one, other = read(a), read(b)
        if one.number and other.number:
            assert one.number.value == other.number.value
        else:
            assert one.assignment or other.assignment or one.words[0] == other.words[0]


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def _children() -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            if int(fields[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


@pytest.mark.slow
def test_hostile_outputs_among_normal_ones_leave_nothing_behind(shared_rows, tmp_path, monkeypatch):
    """100 hostile calls in 2,500 normal ones: pool alive, memory flat, no process left."""
    monkeypatch.chdir(tmp_path)
    hostile = shared_rows("grader_hostile.jsonl")
    normal = [row for row in shared_rows("math/train.jsonl") if parse_reference(row["solution"])]
    rng = random.Random(0)
    before_children = _children()
    monkeypatch.setattr(pool, "RECYCLE_AFTER", 200)
    with Grader(workers=2, deadline=1.0) as grader:
        # the first pass fills the caches, whose size is bounded
        peak_after_first = 0
        for part in range(10):
            batch = [
                (f"\\boxed{{{parse_reference(row['solution']).text}}}", row["solution"], True)
                for row in rng.sample(normal, 250)
            ]
            for index in range(9):
                row = hostile[(part * 9 + index) % len(hostile)]
                # another spelling each time, so that no verdict is remembered
                pred = row["pred"].replace("}", f" \\!{'~' * part}}}", 1) if part else row["pred"]
                batch.append((pred, row["gold"], None))
            # passes the guards and outlives every deadline
            endless = f"\\boxed{{\\int_0^1 \\sin(\\tan(x^{{{part + 2}}})) e^{{x^3}} dx}}"
            batch.append((endless, "1+x", False))
            rng.shuffle(batch)
            start = time.monotonic()
            verdicts = grader.grade([b[0] for b in batch], [b[1] for b in batch])
            assert time.monotonic() - start < 60
            for (_, _, expected), verdict in zip(batch, verdicts, strict=True):
                assert expected is None or verdict.correct == expected
            if part == 3:
                peak_after_first = _resident_bytes()
        assert _resident_bytes() - peak_after_first < 32 << 20
        assert grader.grade(["\\boxed{x+1}"], ["1+x"])[0].correct
        pids = grader.worker_pids
        counters = grader.counters()
    assert counters["graded"] == 10 * 260 + 1
    assert counters["timeouts"] >= 10
    assert _children() - before_children == set()
    assert not (set(pids) & _children())
    assert list(tmp_path.iterdir()) == []
