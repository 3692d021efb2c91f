"""Every trace ends in an answer that its generator's scorer accepts."""

import pytest
from reasoning_gym.factory import create_dataset

from bacr_jax.config import DataConfig
from bacr_jax.questions.characters import TAGS, VOCABULARY
from bacr_jax.questions.loaders import load_questions
from bacr_tasks import gym_traces

SHORT = DataConfig(prompt_format="characters")
# The reasonable sizes of a small model, and the generators' own, which are larger.
SPECS = {
    **{f"{name} as it is": name for name in gym_traces.SHORT},
    "path_star": "path_star?node_range=99&reversed=true",
    "count_primes": "count_primes?max_n=200",
    "chain_sum": "chain_sum?allow_negation=true",
    "gcd": "gcd?max_numbers=4&max_value=99",
}


def check(spec, size, styles=gym_traces.STYLES):
    """Traces of training items in the styles, at least as many items as asked for."""
    more = "&" if "?" in spec else "?"
    questions = load_questions(f"gym:{spec}{more}size={size}", SHORT, 0, "train")
    dataset = create_dataset(spec.partition("?")[0], seed=0)
    known = set(VOCABULARY)
    assert len(questions) == size
    for (source, row), prompt in zip(questions.rows, questions.questions):
        item = {"question": row.question, "answer": row.answer, "metadata": row.metadata}
        assert known.issuperset(prompt) and known.issuperset(row.answer)
        for style in styles:
            trace = source.trace(row, style)
            answer = trace.rpartition("=")[2]
            assert answer == row.answer and dataset.score_answer(answer, item) == 1.0
            assert not any(tag in trace for tag in TAGS)
            assert trace.startswith(gym_traces.MARKS[style] or "=") and known.issuperset(trace)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_traces_end_in_an_answer_that_the_scorer_accepts(spec):
    check(spec, 20 if spec == "count_primes" else 150)


# Small sizes, with which many prompts are equal. Graphs of path_star are never so small.
SMALL = {
    "count_bits": "count_bits?max_n=99",
    "circuit_logic": "circuit_logic?min_terms=2&max_terms=2&min_inputs=2&max_inputs=2",
    "gcd": "gcd?max_value=9",
    "chain_sum": "chain_sum?max_terms=2&max_digits=1&allow_negation=true",
    "count_primes": "count_primes?max_n=20",
    "letter_counting": "letter_counting?min_words=1&max_words=1",
    "number_sorting": "number_sorting?max_numbers=3&max_value=4&min_value=0&max_decimals=0",
}


@pytest.mark.parametrize("spec", SMALL.values(), ids=SMALL)
def test_a_short_prompt_determines_its_answer(spec):
    found = load_questions(f"gym:{spec}&size=1000", SHORT, 0, "train")
    answers = {}
    for prompt, answer in zip(found.questions, found.answers):
        answers.setdefault(prompt, set()).add(answer)
    assert all(len(one) == 1 for one in answers.values()) and len(answers) < len(found)


@pytest.mark.parametrize("field", ["min_inputs=1", "min_terms=1&max_terms=2"])
def test_a_pretrained_model_reads_a_circuit_of_any_size(field):
    assert load_questions(f"gym:circuit_logic?{field}&size=9", DataConfig(num_groups=1), 0, "test")


@pytest.mark.slow
@pytest.mark.parametrize("name", gym_traces.SHORT)
def test_traces_of_ten_thousand_items(name):
    spec = f"{name}?max_n=200" if name == "count_primes" else name
    check(spec, 10_000)


# Worked out by hand, at once, by steps, with checks.
WORKED = {
    "count_bits": (
        {"number": 6}, "2", "=2", ":6,0;3,1;1,2=2", "?6=3+3+0,0;3=1+1+1,1;1=0+0+1,2=2",
    ),
    "gcd": (
        {"numbers": [10, 4]}, "2", "=2", ":10,4,2,0=2", "?10=2*4+2;4=2*2+0=2",
    ),
    "chain_sum": (
        {"expression": "4 - 7 + 1"}, "-2", "=-2", ":4-7=-3;-3+1=-2=-2",
        "?4-7=-3,-3+7=4;-3+1=-2,-2-1=-3=-2",
    ),
    "circuit_logic": (
        {"assignments": {"A": 0, "B": 1}, "term_strings": ["A↑B", "B'⊕B"], "final_gate": "NOR"},
        "0", "=0", ":A0|B1=1;B1'^B1=1;1-1=0", "?A0|B1:0|1=1;B1'^B1:0^1=1;1-1=0",
    ),
    "count_primes": (
        {"start": 8, "end": 13, "primes": [11, 13]}, "2", "=2", ":11,1;13,2=2", "?9/3;11,1;13,2=2",
    ),
    "letter_counting": (
        {"target_letter": "a", "span": ["Ah", "no", "aha"]}, "3", "=3", ":1,1,3=3",
        "?Ah,1;no,1;aha,3=3",
    ),
    "number_sorting": (
        {"direction": "descending", "original_numbers": ["1", "3", "2"]}, "[3,2,1]", "=[3,2,1]",
        ":1;3,1;3,2,1=[3,2,1]", "?1;3,1;3,2,1;3>2>1=[3,2,1]",
    ),
}  # fmt: skip


class Row:
    def __init__(self, question, metadata, answer):
        self.question, self.metadata, self.answer = question, metadata, answer


@pytest.mark.parametrize("name", WORKED)
def test_traces_are_worked_out_as_by_hand(name):
    metadata, answer, *traces = WORKED[name]
    row, form = Row("", metadata, answer), gym_traces.SHORT[name]
    assert [form.trace(row, style) for style in gym_traces.STYLES] == traces


def test_a_path_is_walked_back_from_its_goal():
    row = Row("...\n|1 2|1 3|2 4|3 5/1 5 = \n", {"center": 1}, "1 3 5")
    form = gym_traces.SHORT["path_star"]
    assert form.prompt(row) == "21,31,42,53/1>5"
    assert form.trace(row, "steps") == ":531=1 3 5" and form.trace(row, "at_once") == "=1 3 5"
    assert form.trace(row, "checks") == "?53;31=1 3 5"
    # Labels are of one width, or a pair of them could be read in two ways.
    row = Row("...\n|1 12|12 3/1 3 = \n", {"center": 1}, "1 12 3")
    assert form.prompt(row) == "1201,0312/01>03" and form.trace(row, "steps") == ":031201=1 12 3"


def test_a_trace_in_words_keeps_its_steps_and_its_answer():
    assert gym_traces.in_words("=7", "at_once") == "The answer is 7."
    words = "Step by step:\n4+2=6\n6+1=7\nThe answer is 7."
    assert gym_traces.in_words(":4+2=6;6+1=7=7", "steps") == words
