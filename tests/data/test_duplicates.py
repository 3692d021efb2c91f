"""Near-duplicates against the definition, by hand and by brute force."""

import json
import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bacr_jax.data.duplicates import (
    THRESHOLD,
    mark_duplicates,
    nearest,
    normalise,
    repeated,
    shingles,
)
from bacr_jax.data.question_set import QuestionSet


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
    score, which = nearest(known, ["one two three four five SEVEN", "one two three four x y"])
    np.testing.assert_allclose(score, [0.6, 0.0])
    assert which.tolist() == [0, -1]
    assert nearest(known, ["one two three four five seven"], threshold=0.61)[1].tolist() == [-1]


def test_texts_of_less_than_three_words():
    assert nearest(["1+", "hi"], ["1 +", "hi there", ""])[1].tolist() == [0, -1, -1]
    assert repeated(["a b", "A  b.", "b a", ""]) == 1


words = st.lists(st.sampled_from("abcdef"), max_size=12).map(" ".join)


@given(
    st.lists(words, max_size=8),
    st.lists(words, max_size=5),
    st.sampled_from([0.2, 0.4, 0.6, 0.8, 1.0]),
)
def test_the_index_misses_no_pair_that_brute_force_finds(known, questions, threshold):
    score, which = nearest(known, questions, threshold=threshold)
    for row, text in enumerate(questions):
        best = max((resemblance(text, other) for other in known), default=0.0)
        if best >= threshold:
            assert score[row] == best == resemblance(text, known[which[row]])
        else:
            assert (score[row], which[row]) == (0.0, -1)


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
    score, which = nearest(train, test)
    found = np.flatnonzero(which >= 0)
    assert 0 < len(found) < 0.1 * len(test)
    for row in found:
        np.testing.assert_allclose(score[row], resemblance(test[row], train[which[row]]))
    # what brute force finds for some of the others
    clean = random.Random(0).sample(sorted(set(range(len(test))) - set(found.tolist())), 5)
    others = [shingles(text) for text in train[::5]]
    for row in clean:
        mine = shingles(test[row])
        assert max(len(mine & other) / len(mine | other) for other in others) < THRESHOLD
    planted = train[4321].replace("$", "").upper()
    assert nearest(train[4000:4500], [planted])[1].tolist() == [321]
