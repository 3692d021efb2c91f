"""The warm-up's batches, row by row and share by share."""

import re
import time
import zlib

import numpy as np
import pytest

from bacr_jax.errors import UserError
from bacr_jax.questions import ledger
from ledger_world import operations, style_of


def parse_row(tokens, mask):
    """A row of a batch as text: question, trace, whether it was cut; checks all that is fixed."""
    length = int((tokens != 0).sum())
    assert not mask[length:].any()
    assert not (tokens[:length] == 0).any()
    text = "".join(ledger.VOCABULARY[token] for token in tokens[:length])
    pattern = r"<bos>([0-9a-h]+)<think>(.*)</think><answer>(\d)</answer>"
    question, trace, answer = re.fullmatch(pattern, text).groups()
    start, wanted = operations(question)
    assert int(answer) == (start + sum(int(n) for _, n in wanted)) % 10
    prompt = 3 + 2 * len(wanted)
    assert not mask[:prompt].any()
    assert mask[prompt : length - 4].all()
    assert mask[length - 2 : length].all()
    tags = mask[length - 4 : length - 2]
    assert tags[0] == tags[1]
    return question, trace, not tags[0]


def batch_of(step, total=100, seed=0, variant="redundant", **options):
    return ledger.warmup_batch(
        seed, step, total, variant=variant, **{"batch_tokens": 3000, **options}
    )


def test_short_traces_are_judged_everywhere_but_at_their_labels():
    rows, masks, levels = ledger.short_traces(40, max_operand=3)
    held_out = {p.question for p in ledger.make_problems(0, 4000, max_operand=3, split="test")}
    assert np.bincount(levels).tolist() == [0, 40, 40, 40, 40, 40]
    for tokens, judged, level in zip(rows, masks, levels):
        text = "".join(ledger.VOCABULARY[token] for token in tokens)
        question, trace = re.match(r"<bos>(\w+)<think>(.*?)</think>", text).groups()
        value, lines = int(question[0]), []
        for label, operand in zip(question[1::2], question[2::2]):
            lines.append(f"{label}{value}+{operand}={(value + int(operand)) % 10}")
            value = (value + int(operand)) % 10
        assert len(lines) == level and trace == "".join(lines) and question not in held_out
        where = np.flatnonzero(judged)
        assert "".join(ledger.VOCABULARY[tokens[i]] for i in where) == "".join(
            line[1:] for line in lines
        )


@pytest.mark.slow
def test_practice_holds_four_times_as_much_of_the_short_style():
    share = {}
    for practice in (False, True):
        short = rows = 0
        for step in range(60, 400):
            for tokens, mask in zip(*batch_of(step, practice=practice)):
                question, trace, cut = parse_row(tokens, mask)
                rows += 1
                short += not cut and len(question) > 3 and style_of(question, trace) == "steps"
        share[practice] = short / rows
    assert 2.0 < share[True] / share[False] < 4.5


def test_practice_is_of_all_levels_from_the_first_step_on():
    levels = [len(parse_row(*row)[0]) // 2 for step in range(8) for row in zip(*batch_of(step))]
    early = [
        len(parse_row(*row)[0]) // 2
        for step in range(8)
        for row in zip(*batch_of(step, practice=True))
    ]
    assert max(levels) == 3 and max(early) == 5


@pytest.mark.parametrize("variant", ["redundant", "tradeoff"])
def test_every_row_is_right_and_not_held_out(variant):
    held_out = {p.question for p in ledger.make_problems(0, 4000, max_operand=3, split="test")}
    cuts = rows = 0
    for step in range(0, 100, 4):
        for tokens, mask in zip(*batch_of(step, variant=variant)):
            question, trace, cut = parse_row(tokens, mask)
            assert question not in held_out
            rows, cuts = rows + 1, cuts + cut
            if cut:
                start, wanted = operations(question)
                complete = len(trace) in (len(wanted) + 3,) and "+" not in trace
                assert not complete
            else:
                style_of(question, trace)
    # a tenth, within five standard deviations
    assert abs(cuts / rows - 0.1) < 5 * (0.09 / rows) ** 0.5


def test_one_of_four_shapes_each_filled():
    shapes = {batch_of(step)[0].shape for step in range(100)}
    assert shapes == {(150, 20), (93, 32), (62, 48), (37, 80)}
    tokens, mask = batch_of(99)
    assert (tokens.dtype, mask.dtype) == (np.int32, np.bool_)


def test_no_bucket_is_wider_than_needed():
    for step in range(100):
        tokens, mask = batch_of(step)
        for row, kept in zip(tokens, mask):
            question, trace, cut = parse_row(row, kept)
            if not cut:
                used = len(trace) + 2 * len(operations(question)[1]) + 7
                assert min(s for s in (20, 32, 48, 80) if s >= used) == tokens.shape[1]


@pytest.mark.parametrize(
    ("variant", "steps", "levels", "shares"),
    [
        ("redundant", (0, 15), 3, {"steps": 1.0}),
        # mixed is none or all redone with chance 2^-n, n uniform over the levels
        (
            "redundant",
            (15, 45),
            3,
            {"redo": 0.5 + 0.875 / 18, "steps": 1 / 6 + 0.875 / 18, "at_once": 1 / 6},
        ),
        (
            "redundant",
            (45, 100),
            5,
            {"redo": 0.6 + 0.25 * 0.19375, "steps": 0.05 + 0.25 * 0.19375, "at_once": 0.1},
        ),
        ("tradeoff", (0, 13), 3, {"steps": 1.0}),
        ("tradeoff", (13, 45), 3, {"steps": 0.5, "at_once": 0.5}),
        ("tradeoff", (45, 100), 5, {"steps": 0.75, "at_once": 0.25}),
    ],
)
def test_each_phase_has_its_styles_and_levels(variant, steps, levels, shares):
    seen, level_counts = [], np.zeros(6)
    for step in range(10 * steps[0], 10 * steps[1])[:300:2]:
        for tokens, mask in zip(*batch_of(step, total=1000, variant=variant)):
            question, trace, cut = parse_row(tokens, mask)
            level_counts[len(operations(question)[1])] += 1
            if not cut:
                seen.append(style_of(question, trace))
    assert not level_counts[levels + 1 :].any()
    # About 10,000 rows, but 150 of one length at a time.
    np.testing.assert_allclose(
        level_counts[1 : levels + 1] / level_counts.sum(), 1 / levels, atol=0.02
    )
    for style, share in shares.items():
        assert abs(seen.count(style) / len(seen) - share) < 0.02, style


@pytest.mark.parametrize(
    ("variant", "step", "tokens", "mask"),
    [("tradeoff", 400, 2046077540, 1385773726), ("redundant", 300, 3865855092, 861026083)],
)
def test_without_budgets_batches_are_what_they_were_before_there_were_any(
    variant, step, tokens, mask
):
    found, on = batch_of(step, 600, variant=variant)
    assert zlib.crc32(np.ascontiguousarray(found).tobytes()) == tokens
    assert zlib.crc32(np.packbits(on).tobytes()) == mask


def test_a_budget_in_the_prompt_says_nothing_of_the_trace():
    budgets = np.array([8, 16, 24, 32])
    lengths = {int(budget): [] for budget in budgets}
    for step in range(45, 100):
        for tokens, mask in zip(*batch_of(step, variant="tradeoff", prompt_budgets=budgets)):
            (mark,) = np.flatnonzero(tokens == ledger.ID["f"])
            digits = int(np.flatnonzero(tokens == ledger.ID["<think>"])[0] - mark)
            told = int("".join(ledger.VOCABULARY[i] for i in tokens[mark + 1 : mark + digits]))
            assert not mask[: mark + digits + 1].any()
            keep = np.delete(np.arange(len(tokens)), np.arange(mark, mark + digits))
            _, trace, _ = parse_row(tokens[keep], mask[keep])
            lengths[told].append(len(trace))
    shares = np.array([len(found) for found in lengths.values()])
    assert shares.sum() > 3000
    # even to four standard errors, and so are the lengths of the traces
    np.testing.assert_allclose(shares / shares.sum(), 0.25, atol=4 * 0.433 / 3000**0.5)
    means = [np.mean(found) for found in lengths.values()]
    spread = np.std(np.concatenate(list(lengths.values()))) / shares.min() ** 0.5
    assert max(means) - min(means) < 4 * spread


def test_a_budget_makes_rows_longer_by_its_mark_and_digits():
    plain, told = batch_of(7), batch_of(7, prompt_budgets=np.array([4, 128]))
    assert told[0].shape[1] == plain[0].shape[1] + 4
    with pytest.raises(
        UserError,
        match="batch_tokens=83 is too small, because .* has 84 tokens; set it to 84 or more",
    ):
        batch_of(7, prompt_budgets=np.array([4, 128]), batch_tokens=83)


def test_a_batch_depends_on_seed_and_step_alone():
    first, again = batch_of(7), batch_of(7)
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[1], again[1])
    assert not np.array_equal(batch_of(7, seed=1)[0][:20, :20], first[0][:20, :20])
    assert not np.array_equal(batch_of(8)[0][:20, :20], first[0][:20, :20])


def test_steps_past_the_end_stay_in_the_last_phase():
    rows = [parse_row(*row) for step in range(100, 120) for row in zip(*batch_of(step))]
    assert {len(operations(question)[1]) for question, _, _ in rows} == {1, 2, 3, 4, 5}


def test_operands_follow_the_setting():
    rows = [
        parse_row(*row) for step in range(45, 60) for row in zip(*batch_of(step, max_operand=7))
    ]
    used = {int(n) for question, _, _ in rows for _, n in operations(question)[1]}
    assert used == {1, 2, 3, 4, 5, 6, 7}


def test_eight_hundred_batches_take_seconds():
    batch_of(0)
    # Seconds of a core, so that other work on the machine does not count.
    start = time.process_time()
    for step in range(200):
        batch_of(step, total=200)
    # .5 to .8 ms each; the model takes a hundred times that
    assert time.process_time() - start < 2.0


def test_fractions_end_at_one():
    for phases in ledger.WARMUP.values():
        ends = [phase.until for phase in phases]
        assert ends == sorted(set(ends))
        assert ends[-1] == 1.0
