"""Near-duplicates by hand and by brute force, and the questions that are held out."""

import dataclasses
import hashlib
import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bacr_jax.config import Config, DataConfig, EvalConfig
from bacr_jax.config.schema import LedgerConfig
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.prompts.task_data import build_task_data
from bacr_jax.questions.question_set import QuestionSet
from bacr_jax.questions.splits import (
    THRESHOLD,
    first_copies,
    held_out,
    identity,
    mark_duplicates,
    near_duplicates,
    normalise,
    repeated,
    shingles,
)


def resemblance(first, second):
    a, b = shingles(first), shingles(second)
    return len(a & b) / len(a | b)


def test_markup_case_and_punctuation_do_not_count_but_operators_and_numbers_do():
    assert normalise("Find $X^2-1$, \\left( now )!") == normalise("find x^2 - 1 left now")
    assert normalise("x+1") != normalise("x-1")
    assert normalise("abc12") == ["abc", "12"]
    assert normalise("Größe") == ["grösse"]


def test_resemblance_by_hand():
    # six words make four shingles; another last word changes one: 3 shared of 5
    known = ["one two three four five six"]
    asked = ["one two three four five SEVEN", "one two three four x y"]
    assert near_duplicates(known, asked).tolist() == [True, False]


def test_texts_of_less_than_three_words():
    found = near_duplicates(["1+", "hi"], ["1 +", "hi there", ""])
    assert found.tolist() == [True, False, False]
    assert repeated(["a b", "A  b.", "b a", ""]) == 1


words = st.lists(st.sampled_from("abcdef"), max_size=12).map(" ".join)


@given(st.lists(words, max_size=8), st.lists(words, max_size=5))
def test_the_index_misses_no_pair_that_brute_force_finds(known, questions):
    best = [max((resemblance(text, other) for other in known), default=0.0) for text in questions]
    assert near_duplicates(known, questions).tolist() == [each >= THRESHOLD for each in best]


def question_set(texts):
    blank = np.zeros(len(texts), np.int32)
    answers = ["1"] * len(texts)
    return QuestionSet("s", list(texts), answers, blank, blank, [str(i) for i in range(len(texts))])


def test_marking_changes_nothing_but_the_mark():
    test = question_set(["what is one plus one", "something else altogether here"])
    marked = mark_duplicates(test, question_set(["What is one plus one?"]))
    assert marked.duplicates.tolist() == [True, False]
    assert not test.duplicates.any()
    assert marked.questions == test.questions
    assert "1 of them near-duplicates of training questions (1 without)" in marked.summary()[0]


def test_real_sets_and_a_planted_copy(shared_data):
    read = lambda name, column: [
        json.loads(line)[column] for line in (shared_data / name).open(encoding="utf-8")
    ]
    train, test = read("math/train.jsonl", "problem"), read("math500/test.jsonl", "problem")
    found = np.flatnonzero(near_duplicates(train, test))
    assert 0 < len(found) < 0.1 * len(test)
    # what brute force finds for some of them, and for some of the others
    sets = [shingles(text) for text in train]
    others = sorted(set(range(len(test))) - set(found.tolist()))
    for rows, near in ((found.tolist(), True), (others, False)):
        for row in random.Random(0).sample(rows, 5):
            mine = shingles(test[row])
            closest = max(len(mine & known) / len(mine | known) for known in sets)
            assert (closest >= THRESHOLD) == near
    planted = train[4321].replace("$", "").upper()
    assert near_duplicates(train[4000:4500], [planted]).tolist() == [True]
    assert near_duplicates(train[4000:4300], [planted]).tolist() == [False]


QUESTIONS = [f"question {n}" for n in range(40)]
TEXTS = st.lists(st.text("ab \n", min_size=1, max_size=6), max_size=60)


def test_the_texts_whose_hash_comes_first_are_held_out():
    digest = lambda text: hashlib.sha256(text.encode()).hexdigest()
    smallest = sorted(QUESTIONS, key=digest)[:3]
    held = held_out(QUESTIONS, 3)
    assert {q for q, out in zip(QUESTIONS, held) if out} == set(smallest)
    # Written down, so that no later version holds out others.
    assert np.flatnonzero(held).tolist() == [1, 11, 22]


@given(TEXTS, st.integers(0, 10), st.randoms())
def test_the_choice_depends_on_texts_alone_and_keeps_nine_tenths(texts, size, random):
    held = held_out(texts, size)
    out = {identity(text) for text, gone in zip(texts, held) if gone}
    different = {identity(text) for text in texts}
    assert len(out) == min(size, len(different) // 10)
    # Copies go together, whatever their blanks.
    assert all((identity(text) in out) == gone for text, gone in zip(texts, held))
    order = random.sample(range(len(texts)), len(texts))
    shuffled = held_out([texts[place] for place in order], size)
    assert [held[place] for place in order] == shuffled.tolist()
    kept = [identity(texts[place]) for place in first_copies(texts)]
    assert sorted(kept) == sorted(different)


def ledger(tokens, *, seed=0, size=2000, **evaluation):
    data = DataConfig(ledger=LedgerConfig(train_size=size))
    config = Config(seed=seed, data=data, eval=EvalConfig(**evaluation))
    return build_task_data(resolve(config).task, tokens, len(tokens))


@pytest.fixture(scope="module")
def task_data(ledger_tokens):
    return ledger(ledger_tokens, holdout=50)


def test_nothing_that_is_held_out_is_trained_on(task_data, ledger_tokens):
    train, holdout = task_data.train, task_data.holdout
    assert len(holdout) == 50 == len(set(holdout.set.questions))
    assert not set(holdout.set.questions) & set(train.set.questions)
    whole = ledger(ledger_tokens, holdout=0).train
    gone = len(whole) - len(train)
    # Easy problems of the ledger repeat, and all copies go.
    assert 50 < gone < 500
    assert {row.reason for row in train.set.left_out} == {"held out for validation"}
    assert len(train.set.left_out) == gone
    for questions in (train, holdout):
        assert len(questions.prompts.tokens) == len(questions.set) == len(questions.set.groups)
        same = {whole.set.questions[i]: whole.prompts.tokens[i] for i in range(len(whole))}
        for text, tokens in zip(questions.set.questions, questions.prompts.tokens):
            np.testing.assert_array_equal(tokens, same[text])
    told = task_data.describe_data()
    assert told[0].startswith(f"training on ledger: {len(train):,} questions")
    assert "validating on ledger, held out for validation: 50 questions" in told


def test_it_does_not_depend_on_how_a_run_is_evaluated(task_data, ledger_tokens):
    """Methods, cadences and sizes compare only if they train on the same questions."""
    other = ledger(ledger_tokens, holdout=50, every=5, samples=0, select="ledger")
    assert other.holdout.set.questions == task_data.holdout.set.questions
    assert other.train.set.ids == task_data.train.set.ids


def test_a_seed_makes_other_problems_and_the_choice_among_common_ones_stays(
    task_data, ledger_tokens
):
    other = ledger(ledger_tokens, seed=1, holdout=50)
    # The hash of the last text held out differs a little; below both, the same is out.
    digest = lambda text: hashlib.sha256(text.encode()).hexdigest()
    limit = min(max(map(digest, e.holdout.set.questions)) for e in (task_data, other))
    for one, two in ((task_data, other), (other, task_data)):
        first = {q for q in one.holdout.set.questions if digest(q) <= limit}
        assert not first & set(two.train.set.questions)


def test_few_questions_are_held_out_of_few_and_none_is_refused_where_they_select(ledger_tokens):
    assert len(ledger(ledger_tokens, size=64).holdout) == 6
    few = ledger(ledger_tokens, size=9)
    assert len(few.holdout) == 0 and len(few.train) == 9
    with pytest.raises(UserError, match=r"eval.holdout=256: at most a tenth .* ledger has only 9"):
        ledger(ledger_tokens, size=9, every=5)
    assert len(ledger(ledger_tokens, size=9, every=5, select="ledger").train) == 9


def test_an_evaluation_of_given_sets_holds_nothing_out(task_data, ledger_tokens):
    config = dataclasses.replace(Config(), eval=EvalConfig(every=5))
    given_sets = build_task_data(
        resolve(config).task,
        ledger_tokens,
        len(ledger_tokens),
        sets=dict(task_data.eval),
    )
    assert len(given_sets.train) == len(given_sets.holdout) == 0
