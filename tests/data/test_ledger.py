import inspect
import json
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bacr_jax.data import ledger
from bacr_jax.errors import UserError

STYLES = ("steps", "redo", "mixed", "at_once")
# Without the runtime type checks that tests run with, whose annotations would refuse first.
unchecked = inspect.unwrap
relaxed = settings(max_examples=60, deadline=None)


@st.composite
def problems(draw):
    """A problem put together here, with its answer."""
    start, operands = (
        draw(st.integers(0, 9)),
        draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)),
    )
    question = str(start) + "".join(f"{c}{n}" for c, n in zip("abcde", operands))
    return ledger.Problem(question, str((start + sum(operands)) % 10), len(operands))


def operations(question):
    """Start digit and (label, operand) pairs, read by a pattern."""
    return int(question[0]), re.findall(r"([a-h])(\d)", question[1:])


def check_trace(question, trace):
    """Re-executes a worked trace line by line; returns lines written twice and the final value."""
    value, wanted = operations(question)
    rest, redone = trace, 0
    for label, operand in wanted:
        total = (value + int(operand)) % 10
        line = f"{value}+{operand}={total}"
        assert rest.startswith(label + line), (question, trace, rest)
        rest = rest[1 + len(line) :]
        if rest.startswith(line):
            rest, redone = rest[len(line) :], redone + 1
        value = total
    assert rest == ""
    return redone, value


def check_at_once(question, trace):
    """Checks copied operands and the result of the short style."""
    start, wanted = operations(question)
    numbers, result = trace.split("=")
    assert [int(digit) for digit in numbers] == [start, *(int(n) for _, n in wanted)]
    assert int(result) == sum(int(digit) for digit in numbers) % 10
    return int(result)


def splitmix64(seed):
    """First output of the generator of that name, in whole numbers."""
    mask = 2**64 - 1
    x = (seed + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_the_hash_is_the_published_one():
    # a published output of splitmix64 for this seed
    assert splitmix64(1234567) == 6457827717110365317


class TestTraces:
    def test_examples_by_hand(self):
        problem, rng = ledger.Problem("4a2b3c1", "0", 3), np.random.default_rng(0)
        assert ledger.render(problem, "steps", rng) == "a4+2=6b6+3=9c9+1=0"
        assert ledger.render(problem, "redo", rng) == "a4+2=64+2=6b6+3=96+3=9c9+1=09+1=0"
        assert ledger.render(problem, "at_once", rng) == "4231=0"

    @relaxed
    @given(problem=problems(), seed=st.integers(0, 1000))
    def test_every_style_works_the_answer_out(self, problem, seed):
        rng = np.random.default_rng(seed)
        n = problem.level
        lengths = {"steps": 6 * n, "redo": 11 * n, "at_once": n + 3}
        for style in STYLES:
            trace = ledger.render(problem, style, rng)
            if style == "at_once":
                redone, value = 0, check_at_once(problem.question, trace)
            else:
                redone, value = check_trace(problem.question, trace)
            assert str(value) == problem.answer
            assert len(trace) == lengths.get(style, 6 * n + 5 * redone)

    def test_mixed_redoes_half_of_the_lines(self):
        problem, rng = ledger.Problem("4a2b3c1d1e2", "3", 5), np.random.default_rng(0)
        redone = [
            check_trace(problem.question, ledger.render(problem, "mixed", rng))[0]
            for _ in range(1000)
        ]
        # 5000 fair coins: 5 standard deviations are 177
        assert abs(sum(redone) - 2500) < 177
        assert set(redone) == {0, 1, 2, 3, 4, 5}

    def test_an_unknown_style(self):
        problem = ledger.Problem("4a2", "6", 1)
        with pytest.raises(UserError, match="steps, redo, mixed, at_once"):
            unchecked(ledger.render)(problem, "stepz", np.random.default_rng(0))


class TestProblems:
    @relaxed
    @given(seed=st.integers(0, 10**6), split=st.sampled_from(["train", "test"]))
    def test_questions_are_well_formed_and_answers_right(self, seed, split):
        for problem in ledger.make_problems(seed, 50, max_operand=3, split=split):
            start, wanted = operations(problem.question)
            assert len(problem.question) == 1 + 2 * problem.level
            assert "".join(label for label, _ in wanted) == "abcde"[: problem.level]
            assert {int(n) for _, n in wanted} <= {1, 2, 3}
            assert int(problem.answer) == (start + sum(int(n) for _, n in wanted)) % 10

    def test_a_seed_always_gives_the_same_set(self):
        make = lambda seed: ledger.make_problems(seed, 64, max_operand=3)
        assert make(3) == make(3)
        assert make(3) != make(4)

    @pytest.mark.parametrize("max_operand", [1, 3, 9])
    def test_no_seed_trains_on_what_another_is_tested_on(self, max_operand):
        make = lambda seed, split: {
            p.question
            for p in ledger.make_problems(seed, 5000, max_operand=max_operand, split=split)
        }
        trained = make(0, "train") | make(1, "train")
        tested = make(0, "test") | make(2, "test")
        assert trained.isdisjoint(tested)
        assert {len(q) for q in tested} == {len(q) for q in trained} == {3, 5, 7, 9, 11}

    @pytest.mark.parametrize("level", range(1, 6))
    def test_a_fifth_of_every_level_is_held_out(self, level):
        train = ledger.split_codes(level, 3, "train")
        test = ledger.split_codes(level, 3, "test")
        total = 10 * 3**level
        assert len(test) == total // 5
        assert sorted([*train, *test]) == list(range(total))

    @pytest.mark.parametrize("level", [1, 2, 3])
    def test_the_split_is_the_documented_one(self, level):
        # Fixed for good: a changed split would train new runs on what old ones were tested on.
        codes = sorted(range(10 * 3**level), key=lambda code: splitmix64(code + (level << 32)))
        held_out = ledger.split_codes(level, 3, "test").tolist()
        assert held_out == codes[: len(codes) // 5]

    def test_codes_count_the_start_digit_and_the_operands_in_mixed_radix(self):
        # 7 + 10 * (2 + 3 * 1): start 7, operands 3 and 2
        rows = ledger.decode_problems(np.array([57]), np.array([2]), max_operand=3)
        assert rows.values[0, :3].tolist() == [7, 0, 2]
        assert rows.operands[0].tolist() == [3, 2, 0, 0, 0]
        assert rows.answers.tolist() == [2]

    def test_sets_are_even_over_levels_and_over_problems(self):
        made = ledger.make_problems(0, 2003, max_operand=3, split="test")
        levels = np.bincount([p.level for p in made])[1:]
        np.testing.assert_array_equal(levels, [401, 401, 401, 400, 400])
        easy = [p.question for p in made if p.level == 1]
        counts = {easy.count(question) for question in set(easy)}
        assert len(set(easy)) == 6
        assert counts == {66, 67}

    def test_levels_can_be_chosen(self):
        made = ledger.make_problems(0, 30, max_operand=3, levels=(2, 4))
        assert [sum(p.level == level for p in made) for level in range(1, 6)] == [0, 15, 0, 15, 0]

    def test_all_held_out_digits_are_not_alike(self):
        # The hash must not hold out the same start digits on every level.
        starts = [frozenset(ledger.split_codes(n, 3, "test")[:6] % 10) for n in range(1, 6)]
        assert len(set(starts)) > 1

    @pytest.mark.parametrize("max_operand", [0, 10])
    def test_operands_must_be_one_digit(self, max_operand):
        with pytest.raises(UserError, match="max_operand"):
            ledger.make_problems(0, 4, max_operand=max_operand)

    @pytest.mark.parametrize("levels", [(), (0,), (6,)])
    def test_levels_must_exist(self, levels):
        with pytest.raises(UserError, match="levels in 1..5"):
            ledger.make_problems(0, 4, max_operand=3, levels=levels)


class TestExamples:
    def test_the_whole_row_by_hand(self):
        problem, rng = ledger.Problem("4a2", "6", 1), np.random.default_rng(0)
        tokens, mask = ledger.supervised_example(problem, "at_once", rng)
        prompt, rest = ["<bos>", *"4a2", "<think>"], [*"42=6", "</think>", "<answer>", "6"]
        assert tokens == [*prompt, *rest, "</answer>"]
        assert mask == [False] * 5 + [True] * 8

    def test_forced_tags_of_a_cut_example_are_not_in_the_loss(self):
        problem, rng = ledger.Problem("4a2b3c1", "0", 3), np.random.default_rng(0)
        kept = set()
        for _ in range(400):
            tokens, mask = ledger.supervised_example(problem, "steps", rng, cut=True)
            length = len(tokens) - 9 - 4
            assert "".join(tokens[9 : 9 + length]) == "a4+2=6b6+3=9c9+1=0"[:length]
            assert tokens[-4:] == ["</think>", "<answer>", "0", "</answer>"]
            assert mask == [False] * 9 + [True] * length + [False, False, True, True]
            kept.add(length)
        # from nothing to all but the last token, every place
        assert kept == set(range(18))

    def test_too_narrow_a_row_is_an_error_not_a_cut(self):
        rows = ledger.decode_problems(np.array([7]), np.array([5]), max_operand=3)
        flags = np.zeros(1, bool)
        redo = np.ones((1, 5), bool)
        with pytest.raises(ValueError, match="72 tokens does not fit in 71"):
            ledger.supervised_batch(rows, redo, flags, flags, np.random.default_rng(0), width=71)


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


def style_of(question, trace):
    n = len(operations(question)[1])
    if "+" not in trace:
        check_at_once(question, trace)
        return "at_once"
    redone, _ = check_trace(question, trace)
    return "steps" if redone == 0 else "redo" if redone == n else "partly redone"


class TestWarmup:
    @pytest.mark.parametrize("variant", ["redundant", "tradeoff"])
    def test_every_row_is_right_and_not_held_out(self, variant):
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

    def test_one_of_four_shapes_each_filled(self):
        shapes = {batch_of(step)[0].shape for step in range(100)}
        assert shapes == {(150, 20), (93, 32), (62, 48), (37, 80)}
        tokens, mask = batch_of(99)
        assert (tokens.dtype, mask.dtype) == (np.int32, np.bool_)

    def test_no_bucket_is_wider_than_needed(self):
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
    def test_each_phase_has_its_styles_and_levels(self, variant, steps, levels, shares):
        seen, level_counts = [], np.zeros(6)
        for step in range(10 * steps[0], 10 * steps[1])[:300]:
            for tokens, mask in zip(*batch_of(step, total=1000, variant=variant)):
                question, trace, cut = parse_row(tokens, mask)
                level_counts[len(operations(question)[1])] += 1
                if not cut:
                    seen.append(style_of(question, trace))
        assert not level_counts[levels + 1 :].any()
        # About 20,000 rows, but 150 of one length at a time.
        np.testing.assert_allclose(
            level_counts[1 : levels + 1] / level_counts.sum(), 1 / levels, atol=0.02
        )
        for style, share in shares.items():
            assert abs(seen.count(style) / len(seen) - share) < 0.02, style

    def test_a_batch_depends_on_seed_and_step_alone(self):
        first, again = batch_of(7), batch_of(7)
        np.testing.assert_array_equal(first[0], again[0])
        np.testing.assert_array_equal(first[1], again[1])
        assert not np.array_equal(batch_of(7, seed=1)[0][:20, :20], first[0][:20, :20])
        assert not np.array_equal(batch_of(8)[0][:20, :20], first[0][:20, :20])

    def test_steps_past_the_end_stay_in_the_last_phase(self):
        rows = [parse_row(*row) for step in range(100, 120) for row in zip(*batch_of(step))]
        assert {len(operations(question)[1]) for question, _, _ in rows} == {1, 2, 3, 4, 5}

    def test_operands_follow_the_setting(self):
        rows = [
            parse_row(*row) for step in range(45, 60) for row in zip(*batch_of(step, max_operand=7))
        ]
        used = {int(n) for question, _, _ in rows for _, n in operations(question)[1]}
        assert used == {1, 2, 3, 4, 5, 6, 7}

    def test_eight_hundred_batches_take_seconds(self):
        batch_of(0)
        start = time.perf_counter()
        for step in range(200):
            batch_of(step, total=200)
        # .5 to .8 ms each on one core; the model takes a hundred times that
        assert time.perf_counter() - start < 2.0

    @pytest.mark.parametrize(
        ("options", "what"),
        [({"variant": "redundent"}, "variant"), ({"batch_tokens": 79}, "batch_tokens: found 79")],
    )
    def test_impossible_settings(self, options, what):
        with pytest.raises(UserError, match=what):
            unchecked(ledger.warmup_batch)(
                0, 0, 1, **{"variant": "redundant", "batch_tokens": 3000, **options}
            )

    def test_fractions_end_at_one(self):
        for phases in ledger.WARMUP.values():
            ends = [phase.until for phase in phases]
            assert ends == sorted(set(ends))
            assert ends[-1] == 1.0


class TestTokenizer:
    TEXT = "<bos>4a2b3c1<think>a4+2=6b6+3=9c9+1=0</think><answer>0</answer><pad>-fgh"

    def test_every_token_is_one_of_the_vocabulary(self):
        tokenizer = ledger.ledger_tokenizer()
        ids = tokenizer(self.TEXT)["input_ids"]
        assert len(tokenizer) == len(ledger.VOCABULARY) == 27
        assert tokenizer.decode(ids) == self.TEXT
        assert tokenizer.convert_ids_to_tokens(ids) == re.findall(r"<[^>]+>|.", self.TEXT)
        assert tokenizer.convert_ids_to_tokens(list(range(27))) == list(ledger.VOCABULARY)

    def test_decoding_without_special_tokens_keeps_the_thinking_tags(self):
        tokenizer = ledger.ledger_tokenizer()
        ids = tokenizer("<bos>4a2<think>42=6</think>")["input_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == "4a2<think>42=6</think>"

    def test_saves_and_loads_in_hugging_face_form(self, tmp_path):
        from transformers import AutoTokenizer

        tokenizer = ledger.ledger_tokenizer()
        tokenizer.save_pretrained(tmp_path)
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        assert loaded(self.TEXT)["input_ids"] == tokenizer(self.TEXT)["input_ids"]
        assert (loaded.pad_token_id, loaded.bos_token, loaded.eos_token) == (
            0,
            "<bos>",
            "</answer>",
        )
        vocab = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
        assert vocab == ledger.ID

    @relaxed
    @given(st.lists(st.sampled_from(ledger.VOCABULARY), max_size=20).map("".join))
    def test_the_fast_encoding_agrees(self, text):
        assert ledger.encode(text) == TOKENIZER(text)["input_ids"]

    @pytest.mark.parametrize("text", ["4x2", "<think", "hello", "<foo>", "4 a"])
    def test_foreign_text_is_refused(self, text):
        with pytest.raises(UserError, match="ledger text"):
            ledger.encode(text)

    def test_importing_the_task_imports_neither_transformers_nor_grain(self):
        code = (
            "import sys, bacr_jax.data.ledger, bacr_jax.data.questions; "
            "sys.exit(bool({'transformers', 'grain'} & set(sys.modules)))"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


TOKENIZER = ledger.ledger_tokenizer()
