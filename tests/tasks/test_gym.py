"""reasoning-gym's generators as a source: specs, splits, levels, scores."""

import ast
import dataclasses
import itertools
import os
import re
import subprocess
import sys

import pytest
from reasoning_gym.factory import create_dataset

from bacr_grading import VerifierGrader, load_verifier
from bacr_grading.verifier import packed
from bacr_jax.config import Config, DataConfig
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.prompts.graders import open_graders
from bacr_jax.questions.loaders import load_questions
from bacr_jax.questions.splits import identity
from bacr_tasks import gym, gym_checked, gym_safe

SHORT = DataConfig(prompt_format="characters")
# Small spaces of items, which their index ranges alone would not keep apart.
FEW = ("chain_sum?max_terms=2&max_digits=1", "count_bits?max_n=255", "gcd?max_value=12")

# Generators of reasoning-gym 0.1.25 with an exception in docs/tasks.md.
NEEDS_MORE = {"composite"}
WITHOUT_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
RAISES = {"prime_factorization"}


@pytest.mark.parametrize(
    ("spec", "fragment"),
    [
        ("chian_sum", "no generator 'chian_sum'; the most similar name is 'chain_sum'"),
        ("chain_sum?min_term=2", "no field 'min_term'; the most similar name is 'min_terms'"),
        ("chain_sum?min_terms=two", "'min_terms' can't be 'two'; use a value of type int"),
        ("chain_sum?min_terms=5&max_terms=2", "(max_terms must be >= min_terms); use other values"),
        ("chain_sum?allow_negation=1", "'allow_negation' can't be 1; use a value of type bool"),
        ("chain_sum?size=0", "'size' can't be 0; use a number from 1 to"),
        ("chain_sum?size", "'size' can't be None; use a value of type int"),
        ("chain_sum?seed=-1", "'seed' can't be -1; use a whole number from 0 to 2147483647"),
        ("chain_sum?seed=2147483648", "'seed' can't be 2147483648; use a whole number from 0"),
        ("chain_sum?seed=null", "'seed' can't be None; use a whole number from 0 to"),
        (
            "chain_sum?min_terms=2024-99-99",
            "'min_terms' can't be '2024-99-99'; use a value of type",
        ),
        ("chain_sum?size=5&size=7", "'size' appears twice; keep only one of them"),
        ("aiw", "with data.prompt_format=characters, only the generators path_star"),
        ("circuit_logic?min_inputs=1", "the field 'min_inputs' can't be 1, because short prompts"),
        ("circuit_logic?min_terms=1", "'min_terms' can't be 1, because short prompts then do not"),
    ],
)
def test_what_can_not_be_made_is_refused_in_one_line(spec, fragment):
    with pytest.raises(UserError) as error:
        load_questions(f"gym:{spec}", SHORT, 0, "train")
    assert fragment in str(error.value) and str(error.value).startswith("gym:")
    assert str(error.value).isprintable()


def test_the_package_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"reasoning-gym is not installed.*bacr_jax\[gym\]"):
        load_questions("gym:chain_sum", SHORT, 0, "train")


@pytest.mark.parametrize("spec", ["chain_sum", "letter_counting", *FEW])
def test_no_item_is_in_two_splits_whatever_the_seeds(spec, monkeypatch):
    monkeypatch.setattr(gym, "SIZES", {"train": 300, "test": 300})
    more = "&" if "?" in spec else "?"
    made = [f"gym:{spec}{more}seed={seed}" for seed in (0, 1, 299)]
    texts = lambda split: {
        identity(text) for one in made for text in load_questions(one, SHORT, 0, split).questions
    }
    train, test = texts("train"), texts("test")
    assert train and test and train.isdisjoint(test)


@pytest.mark.parametrize("split", ["train", "test"])
def test_near_seeds_make_other_questions(split):
    sets = []
    for seed in (0, 1, 2, 3):
        spec = f"gym:chain_sum?min_terms=4&size=300&seed={seed}"
        sets.append(set(load_questions(spec, SHORT, 0, split).questions))
    for one, other in itertools.combinations(sets, 2):
        assert len(one & other) < 15


def test_the_first_seed_makes_the_items_of_the_package(monkeypatch):
    """Recorded runs use it."""
    monkeypatch.setattr(gym, "SIZES", {"train": 20, "test": 20})
    dataset = create_dataset("chain_sum", seed=0, size=20_000)
    for split, spec in itertools.product(("train", "test"), ("chain_sum", "chain_sum?seed=0")):
        rows = gym.source(spec, short=False).questions(split)
        for row in rows:
            index = int(row["id"].rpartition("-")[2])
            assert row["question"] == dataset[index]["question"]


def test_a_sets_scorer_and_its_items_have_the_same_seed():
    (row, *_) = gym.source("chain_sum?seed=5&size=3", short=False).questions("test")
    index = int(row["id"].rpartition("-")[2])
    name, fields = row["metadata"]["reasoning_gym"]
    made = create_dataset(name, **{**fields, "size": index + 1})[index]
    assert (made["question"], made["answer"]) == (row["question"], row["answer"])


def test_a_thousand_seeds_are_farther_apart_than_the_indices_of_a_set():
    starts = sorted(gym.spread_seed(seed) for seed in range(1000))
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    assert starts[0] == 0 and starts[-1] < 1 << 31
    assert min(gaps) > gym.TRAIN_START + gym.MOST_TRIES * 20_000


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_size_that_can_not_be_met_is_refused(split, monkeypatch):
    monkeypatch.setattr(gym, "TRAIN_START", 200)
    monkeypatch.setattr(gym, "_LAST_INDEX", 400)
    assert len(load_questions("gym:gcd?size=20", SHORT, 0, split)) == 20
    # Without a size, a split has as many questions as there are.
    assert 20 < len(load_questions("gym:gcd", SHORT, 0, split)) < 200
    with pytest.raises(UserError) as error:
        load_questions("gym:gcd?size=200", SHORT, 0, split)
    assert re.fullmatch(
        rf"gym:gcd\?size=200: with these field values, the {split} split has only \d+ questions, "
        "fewer than 'size'; use a smaller size, or leave it out",
        str(error.value),
    )


def test_test_items_are_all_different_and_training_items_come_as_they_are_made():
    test = load_questions(f"gym:{FEW[0]}", SHORT, 0, "test")
    train = load_questions(f"gym:{FEW[0]}&size=1000", SHORT, 0, "train")
    assert len(test) == len(set(test.questions)) < 100
    # 200 sums of two digits, a quarter of them held out.
    assert len(train) == 1000 and 100 < len(set(train.questions)) < 200


def test_a_set_does_not_depend_on_the_runs_seed():
    sets = [load_questions("gym:chain_sum?size=20", SHORT, seed, "train") for seed in (0, 1)]
    assert sets[0].questions == sets[1].questions and len(set(sets[0].ids)) == 20


def test_levels_say_where_an_item_lies_between_its_generators_ranges():
    found = load_questions("gym:chain_sum?min_terms=2&max_terms=4&max_digits=1", SHORT, 0, "test")
    terms = [1 + question.count("+") + question.count("-") for question in found.questions]
    assert dict(zip(terms, found.levels.tolist())) == {2: 1, 3: 3, 4: 5}
    assert set(load_questions("gym:circuit_logic?size=9", SHORT, 0, "test").levels) == {0}


def test_a_big_model_reads_the_generators_own_question():
    plain = load_questions("gym:gcd?size=5", DataConfig(), 0, "test")
    short = load_questions("gym:gcd?size=5", SHORT, 0, "test")
    assert all(text.startswith("Find the Greatest Common Divisor") for text in plain.questions)
    assert plain.ids == short.ids and all("," in text for text in short.questions)


def graded(spec, answers_of, config=SHORT):
    """Verdicts on answers to a set of ten questions, and the grader's counters."""
    questions = load_questions(spec, config, 0, "test")
    whole = dataclasses.replace(Config(), data=config)
    grader = open_graders(resolve(whole).task.grader, [questions])[questions.graded_by]
    with grader:
        texts = [f"<answer>{answers_of(gold)}</answer>" for gold in questions.answers]
        asked = {"questions": questions.questions}
        return grader.grade(texts, questions.answers, **asked), grader.counters()


@pytest.mark.slow  # two workers import reasoning-gym
def test_the_generators_scorer_decides_and_only_all_of_it_counts():
    spec = "gym:chain_sum?min_terms=2&max_terms=3&size=10"
    right, _ = graded(spec, lambda gold: f"{gold}.00")
    assert [v.correct for v in right] == [True] * 10
    # A tolerant scorer gives an answer that holds the right one a part of the score.
    partly, counts = graded("gym:letter_counting?size=10", lambda gold: f"it is {gold}")
    assert [v.correct for v in partly] == [False] * 10
    assert counts["partly_correct"] == 10 and 0 < counts["score_percent"] < 500


@pytest.mark.slow  # the same
def test_a_scorer_that_raises_is_counted():
    verdicts, counts = graded(
        "gym:prime_factorization?size=10", lambda gold: "none", config=DataConfig()
    )
    assert {v.path for v in verdicts} == {"failed"} and counts["failed_raised"] == 10


# Where each piece of code would leave a trace; `os`, the scorer's class, its worker's pipes.
ATTACKS = (
    "__import__('os').system('touch {mark}')",
    "exec('import reasoning_gym.games.countdown as c; "
    "c.CountdownDataset.score_answer = lambda *a, **k: 1.0')",
    "exec('import builtins; builtins.float = lambda x: 24.0')",
    "__import__('random').seed(0)",
    '__import__(\'os\').write(1, b\'{{"scores": [1.0], "faults": [""], "message": ""}}\\n\')',
    "__import__('os').kill(__import__('os').getppid(), 9)",
    "[__import__('os').fork() for _ in range(99)]",
    "__import__('socket').create_connection(('127.0.0.1', 9))",
    "print('1.0')",
    "9**9**9",
    "(" * 9999,
    "1+" * 500_000 + "1",
    "1\0",
)


@pytest.mark.slow  # a worker imports reasoning-gym
@pytest.mark.parametrize("name", ["countdown", "n_queens", "polynomial_multiplication"])
def test_no_answer_is_run_or_changes_the_scores_of_others(name, tmp_path):
    questions = load_questions(f"gym:{name}?size=4", DataConfig(), 0, "test")
    config = dataclasses.replace(Config(), data=DataConfig())
    mark = tmp_path / "ran"
    attacks = [attack.replace("{mark}", str(mark)) for attack in ATTACKS]
    texts = [*questions.answers[:1], *attacks, "wrong", *questions.answers[:1]]
    with open_graders(resolve(config).task.grader, [questions])[questions.graded_by] as grader:
        verdicts = grader.grade(
            [f"<answer>{text}</answer>" for text in texts],
            questions.answers[:1] * len(texts),
            questions=questions.questions[:1] * len(texts),
        )
        again = grader.grade(
            ["<answer>still wrong</answer>"],
            questions.answers[1:2],
            questions=questions.questions[1:2],
        )
        assert grader.counters()["worker_deaths"] == 0
    rights = [verdict.correct for verdict in verdicts]
    assert rights == [True, *[False] * (len(texts) - 2), True]
    assert not again[0].correct
    assert not mark.exists()


@pytest.mark.slow  # the same
def test_the_scorers_process_has_no_tokens_and_writes_no_file(monkeypatch, tmp_path):
    """By a scorer that takes over its process, as one that nobody has read may let an answer do."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    source = tmp_path / "scorer.py"
    source.write_text(
        "import os\nCOUNT = []\n"
        "def score(answer, row):\n"
        "    COUNT.append(answer)\n"
        "    return float(eval(answer))\n"
    )
    verifier = dataclasses.replace(
        load_verifier(f"{source}:score"), of_rows=True, whole=True, third_party=True
    )
    row = packed({"id": "1", "question": "?", "answer": "1", "metadata": {}, "level": 0})
    mark = tmp_path / "ran"
    asked = {
        "'HF_TOKEN' in os.environ or 'WANDB_API_KEY' in os.environ": 0,
        f"open({str(mark)!r}, 'w') and 1": "failed",
        f"os.system('touch {mark}') == 0": 0,
        "os.kill(os.getppid(), 9) or 1": "failed",
        "__import__('socket').socket() and 1": "failed",
        "os.fork() or 1": "failed",
        'os.write(3, b\'["token", 1.0, "", ""]\\n\') * 0': "failed",
        "os.getuid() == os.getuid()": 1,
    }
    with VerifierGrader(verifier, rows={("?", "1"): row}, workers=1, deadline=5) as grader:
        texts = [f"<answer>{answer}</answer>" for answer in asked]
        verdicts = grader.grade(texts, ["1"] * len(texts), questions=["?"] * len(texts))
        # The state that a batch leaves is gone with it.
        (fresh,) = grader.grade(["<answer>len(COUNT) == 1</answer>"], ["1"], questions=["?"])
        assert grader.counters()["worker_deaths"] == 0
    found = {
        answer: "failed" if verdict.path == "failed" else int(verdict.correct)
        for answer, verdict in zip(asked, verdicts)
    }
    assert found == asked
    assert fresh.correct
    assert not mark.exists()


def test_an_integral_that_has_no_reference_is_not_asked():
    rows = load_questions("gym:intermediate_integration?size=40", DataConfig(), 0, "test")
    assert len(rows) == 40
    assert not [answer for answer in rows.answers if "Integral" in answer]


def score_of(name, dataset, answer, item):
    try:
        return gym_safe.score_answer(name, dataset, answer, item)
    except Exception:
        return "raises"


@pytest.mark.slow
def test_all_generators_but_those_that_the_docs_name(monkeypatch):
    from reasoning_gym.factory import DATASETS

    monkeypatch.setattr(gym, "SIZES", {"test": 6})

    found = {"without": set(), "anything": set(), "raises": set(), "needs more": set()}
    for name, (dataset_class, config_class) in sorted(DATASETS.items()):
        try:
            source = gym.source(name, short=False)
        except ValueError:
            found["needs more"].add(name)
            continue
        rows = source.questions("test")
        dataset = dataset_class(config_class(seed=gym.SEED))
        assert 4 <= len(rows) <= 6 and all(row["question"].strip() for row in rows), name
        for row in rows:
            item = {key: row[key] for key in ("question", "answer", "metadata")}
            if row["answer"] is None:
                found["without"].add(name)
            else:
                assert score_of(name, dataset, row["answer"].strip(), item) == 1.0, (
                    name,
                    row["id"],
                )
            wrong = score_of(name, dataset, "definitely wrong", item)
            if wrong == "raises":
                found["raises"].add(name)
            elif wrong >= 1.0:
                found["anything"].add(name)
    assert len(DATASETS) == 106
    assert found == {
        "without": WITHOUT_ANSWER, "anything": set(), "raises": RAISES,
        "needs more": NEEDS_MORE,
    }  # fmt: skip


PRINT_QUESTIONS = """
import random, sys
from bacr_tasks import gym
random.seed()
questions = {}
for name in sys.argv[1:]:
    try:
        rows = gym.source(f"{name}?size=4", short=False).questions("train")
    except ValueError:
        continue  # needs other fields, or fails on an item
    questions[name] = [(row["id"], row["question"], str(row["answer"])) for row in rows]
print()  # a few generators print
print(questions)
"""


def questions_of_a_process(names, hash_seed):
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRINT_QUESTIONS, *names],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return ast.literal_eval(result.stdout.splitlines()[-1])


# One whose items depend on the order of sets, one that uses Python's global random numbers.
@pytest.mark.parametrize(
    "names",
    [
        ("ransom_note", "list_functions"),
        pytest.param(tuple(gym_checked.CHECKED), marks=pytest.mark.slow),
    ],
    ids=["two", "all"],
)
def test_every_process_makes_the_same_items(names):
    first = questions_of_a_process(names, "1")
    second = questions_of_a_process(names, "2")
    assert len(first) >= min(len(names), 90)
    assert {name for name in first if first[name] != second[name]} == set()
