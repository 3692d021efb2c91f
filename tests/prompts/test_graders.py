"""A grader of several processes, which are threads here that exchange what they say."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bacr_grading import ExactGrader, Verdict
from bacr_jax.config import Config
from bacr_jax.config.settings import resolve
from bacr_jax.parallel import processes
from bacr_jax.prompts.graders import SharedGrader, grade_early, open_graders
from bacr_jax.questions.loaders import load_questions


class Noted(ExactGrader):
    """Keeps the texts that it was shown."""

    def __init__(self, last_failure=""):
        super().__init__()
        self.seen, self.last_failure = [], last_failure

    def grade(self, texts, references, **options):
        self.seen += texts
        return super().grade(texts, references, **options)


@pytest.fixture
def among(monkeypatch):
    """Runs a function in as many threads, each with a place and with what all of them say."""

    def run(count, act):
        here, said, barrier = threading.local(), [None] * count, threading.Barrier(count)

        def exchange(mine):
            said[here.index] = mine
            barrier.wait(10)
            heard = list(said)
            barrier.wait(10)
            return heard

        monkeypatch.setattr(processes, "rank_among_all", lambda: (here.index, count))
        monkeypatch.setattr(processes, "texts_of_all", exchange)
        monkeypatch.setattr(processes, "summed", lambda values: np.sum(exchange(values), 0))

        def one(index):
            here.index = index
            return act(index)

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(one, range(count)))

    return run


TEXTS = [f"<answer>{i % 3}</answer>" if i % 4 else "none" for i in range(11)]
GOLDS = [str(i % 2) for i in range(11)]


@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_every_process_hears_what_one_grader_would_say(among, count):
    alone, graders = ExactGrader(), [Noted() for _ in range(count)]
    expected = alone.grade(TEXTS, GOLDS)

    def act(index):
        shared = SharedGrader(graders[index])
        return shared.grade(TEXTS, GOLDS, poll=pytest.fail), shared.counters()

    found = among(count, act)
    assert found == [(expected, alone.counters())] * count
    # Each text by one process alone.
    seen = [len(grader.seen) for grader in graders]
    assert sum(seen) == len(TEXTS) and max(seen) - min(seen) <= 1


def test_scores_are_heard_to_the_last_bit_and_odd_texts_as_they_are(among):
    said = Verdict(1 / 3, '\ud800 "\n', "verifier", timed_out=True, strict=0.1)

    class Own:
        def grade(self, texts, references, *, mode, questions):
            assert [f"{text}?" for text in texts] == questions
            return [said] * len(texts)

    ask = lambda index: SharedGrader(Own()).grade(["a", "b", "c"], list("123"), questions=OTHERS)
    assert among(2, ask) == [[said] * 3] * 2


OTHERS = ["a?", "b?", "c?"]


def test_the_last_failure_is_some_processs(among):
    graders = [Noted(""), Noted("late"), Noted("NaN")]
    assert among(3, lambda index: SharedGrader(graders[index]).last_failure) == ["late"] * 3
    assert among(2, lambda index: SharedGrader(Noted()).last_failure) == ["", ""]


class Early(Noted):
    """Keeps the requests that it was to begin with, and those that it was asked about."""

    def __init__(self):
        super().__init__()
        self.begun, self.asked = [], []

    def ahead(self, texts, references, *, mode, questions):
        self.begun += zip(texts, references, [mode] * len(texts), questions, strict=True)

    def grade(self, texts, references, *, mode, questions):
        self.asked += zip(texts, references, [mode] * len(texts), questions, strict=True)
        return super().grade(texts, references, mode=mode)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_process_begins_with_the_answers_that_it_is_asked_about(among, count):
    cells = np.arange(5 * 3).reshape(5, 3)
    text = lambda number: f"<answer>{number}</answer>"
    golds, questions = list("abcde"), [f"{row}?" for row in "abcde"]
    graders = [Early() for _ in range(count)]

    def act(index):
        texts_of = lambda trunks, rows: [[text(number) for number in row] for row in rows]
        begin = grade_early(graders[index], texts_of, golds, questions)
        for rows in ([3], [0, 4], [2, 1]):
            begin(np.array(rows), None, cells[rows])
        each = lambda given: [one for one in given for _ in range(3)]
        texts = [text(number) for number in range(15)]
        SharedGrader(graders[index]).grade(texts, each(golds), questions=each(questions))

    among(count, act)
    for grader in graders:
        assert sorted(grader.begun) == sorted(grader.asked)
        assert len(grader.begun) >= 15 // count


def test_graders_are_opened_by_their_settings_or_by_a_config():
    config = Config()
    questions = load_questions("ledger", config.data, 0, "test")
    for settings in (config, resolve(config).task.grader):
        (grader,) = open_graders(settings, [questions]).values()
        with grader:
            assert grader.grade(["<answer>3</answer>"], ["3"])[0].correct
