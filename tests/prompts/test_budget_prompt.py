"""The budget in words: ids of the whole text, one width, the question where it was."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import hf_world
from bacr_jax.config import Config
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.prompts.budget_prompt import budget_words, make_budget_prompts
from bacr_jax.prompts.encoding import encode_prompts
from bacr_jax.prompts.formats import FORMATS
from bacr_jax.prompts.task_data import build_task_data
from bacr_jax.questions import ledger
from bacr_jax.types import NO_BUDGET

LEDGER, TAGS, BOXED = FORMATS["ledger"], FORMATS["think_answer"], FORMATS["boxed"]
WORDS = Config().conditioning.prompt_text
QUESTIONS = (
    "What is $1+1$?", "Solve \\[x^2 = 4\\]", "Wie groß ist 数 🙂?", "How many of 12", "a\n\nb.",
    "Is <|im_end|> a token?",
)  # fmt: skip


def config_of(told, **sections):
    conditioning = dataclasses.replace(Config().conditioning, budget_input=told)
    return dataclasses.replace(Config(), conditioning=conditioning, **sections)


def texts(tokenizer, prompts):
    return [tokenizer.decode(row[:n]) for row, n in zip(prompts.tokens, prompts.lengths)]


def at(tokenizer, style, words, questions, budgets, largest=32768):
    """The questions in turn, one per budget."""
    without_budget, _ = encode_prompts(tokenizer, questions, style, max_tokens=2000)
    told, _ = make_budget_prompts(
        tokenizer, questions, style, words, largest=largest, max_tokens=2000
    )
    index = np.arange(len(budgets)) % len(questions)
    rows = dataclasses.replace(
        without_budget,
        **{
            f.name: getattr(without_budget, f.name)[index]
            for f in dataclasses.fields(without_budget)
        },
    )
    return told.at(index, np.asarray(budgets), rows), rows


def test_only_words_and_both_are_in_words():
    said = {told: budget_words(resolve(config_of(told)).task.budget_text, TAGS) for told in
            ("embedding", "prompt", "both", "none")}  # fmt: skip
    assert said == {"embedding": "", "prompt": WORDS, "both": WORDS, "none": ""}
    assert budget_words(WORDS, LEDGER) == "f{budget}"


def test_a_problem_of_the_ledger_is_followed_by_the_budgets_digits(ledger_tokens):
    budgets = [8, 24, NO_BUDGET, 130]
    found, without_budget = at(ledger_tokens, LEDGER, "f{budget}", ["4a2b3c1", "7a3"], budgets, 512)
    assert texts(ledger_tokens, found) == [
        "<bos>4a2b3c1f8<think>", "<bos>7a3f24<think>", "<bos>4a2b3c1<think>", "<bos>7a3f130<think>"
    ]  # fmt: skip
    # 9 tokens of the longest prompt, the mark and three digits, whatever the budgets are
    assert found.tokens.shape == (4, 13) and found.tokens.dtype == np.int32
    np.testing.assert_array_equal(found.question_start, without_budget.question_start)
    np.testing.assert_array_equal(found.question_end, without_budget.question_end)


def test_the_warm_ups_prompts_are_those_of_the_run(ledger_tokens):
    tokens, mask = ledger.warmup_batch(
        0, 5, 10, variant="redundant", batch_tokens=800, prompt_budgets=np.array([7, 16, 105])
    )
    for row, on in zip(tokens, mask):
        prompt = ledger_tokens.decode(row[: on.argmax()]).removesuffix("</think><answer>")
        question, _, told = prompt.removeprefix("<bos>").partition("<think>")[0].partition("f")
        found, _ = at(ledger_tokens, LEDGER, "f{budget}", [question], [int(told)])
        assert texts(ledger_tokens, found) == [f"<bos>{question}f{told}<think>"]
        length = int(found.lengths[0])
        np.testing.assert_array_equal(row[:length], found.tokens[0, :length])


@pytest.mark.parametrize("style", [TAGS, BOXED], ids=lambda style: style.name)
def test_exact_text_in_the_tokenizers_own_template(qwen, style):
    found, _ = at(qwen, style, WORDS, QUESTIONS[:2], [512, 8])
    for question, budget, text in zip(QUESTIONS, (512, 8), texts(qwen, found)):
        said = f"{question}{style.after}\n\nThink for at most {budget} tokens."
        messages = [
            {"role": "system", "content": style.system},
            {"role": "user", "content": said},
        ]
        rendered = qwen.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert text == rendered + style.think_open


@settings(max_examples=25)
@given(
    budgets=st.lists(st.integers(0, 32768), min_size=1, max_size=6),
    question=st.text(min_size=1).filter(str.strip),
    words=st.sampled_from([WORDS, "{budget}", "Budget:{budget}tokens", "(<={budget})\n\n!"]),
    style=st.sampled_from([TAGS, BOXED]),
)
@example(budgets=[0, 512, 32768], question="Is 7.", words="x{budget}7", style=BOXED)
def test_ids_are_those_of_the_whole_text(qwen, budgets, question, words, style):
    found, without_budget = at(qwen, style, words, [*QUESTIONS, question], budgets + budgets[::-1])
    for row, length, text in zip(found.tokens, found.lengths, texts(qwen, found)):
        assert row[:length].tolist() == qwen(text, add_special_tokens=False)["input_ids"]
    np.testing.assert_array_equal(found.question_start, without_budget.question_start)
    np.testing.assert_array_equal(found.question_end, without_budget.question_end)


def test_an_untold_row_is_the_prompt_of_a_policy_that_is_told_nothing(qwen):
    found, without_budget = at(qwen, TAGS, WORDS, QUESTIONS, [NO_BUDGET] * len(QUESTIONS))
    width = without_budget.tokens.shape[1]
    np.testing.assert_array_equal(found.tokens[:, :width], without_budget.tokens)
    assert not found.tokens[:, width:].any()
    np.testing.assert_array_equal(found.lengths, without_budget.lengths)


def test_the_sentence_counts_against_the_longest_prompt(ledger_tokens):
    # 5, 7 and 11 tokens, and three for the mark and two digits
    questions, longest = ["7a3", "1a1b1", "4a2b3c1d1"], {"largest": 32, "max_tokens": 10}
    told, dropped = make_budget_prompts(ledger_tokens, questions, LEDGER, "f{budget}", **longest)
    assert dropped.tolist() == [2] and told.longest == 10
    with pytest.raises(
        UserError, match="max_prompt_tokens=7: all 3 prompts are longer, with 8 tokens"
    ):
        make_budget_prompts(ledger_tokens, questions, LEDGER, "f{budget}", largest=32, max_tokens=7)
    with pytest.raises(ValueError, match="budget 100 is encoded as more than 2 tokens"):
        told.at(np.array([0]), np.array([100]), told.opened)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    rows = [{"question": f"What is {i} plus {i}?" + " Say." * 20 * (i == 3), "answer": str(2 * i)}
            for i in range(1, 5)]  # fmt: skip
    (folder / "set.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "set.jsonl"


@pytest.mark.parametrize("told", ["embedding", "prompt", "both"])
def test_a_run_keeps_prompts_without_a_budget_and_tells_it_row_by_row(sets, qwen, told):
    spec = f"jsonl:{sets}"
    data = dataclasses.replace(
        Config().data, train=spec, eval=(spec,), max_prompt_tokens=80, num_groups=1
    )
    evaluated = dataclasses.replace(Config().eval, budgets=(512, 131072))
    config = config_of(told, data=data, eval=evaluated)
    task_data = build_task_data(resolve(config).task, qwen, 151_936)
    task_data.close()
    questions = task_data.train
    assert len(questions) == 3 and resolve(config).task.largest_budget == 131072
    found = questions.at(np.array([2, 0, 1]), np.array([512, 77, NO_BUDGET]))
    said = [f"most {b} tokens." in t for b, t in zip((512, 77, 0), texts(qwen, found))]
    assert said == [told != "embedding"] * 2 + [False]
    assert "Think for" not in "".join(texts(qwen, questions.prompts))
    assert task_data.longest_prompt == questions.longest
    more = len(qwen("\n\nThink for at most 131072 tokens.")["input_ids"])
    plain = int(questions.prompts.lengths.max())
    # `.` and the line break before the sentence are one token of the two
    assert questions.longest - plain == (more - 1 if told != "embedding" else 0)
    assert found.tokens.shape[1] == questions.longest


def byte_tokenizer(merges):
    from tokenizers import decoders, models, pre_tokenizers

    found = hf_world.chat_tokenizer()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: i for i, text in enumerate([*letters, *map("".join, merges)])}
    found.backend_tokenizer.model = models.BPE(vocabulary, merges)
    found.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    found.backend_tokenizer.decoder = decoders.ByteLevel()
    return found


def test_a_tokenizer_that_joins_the_number_with_the_text_beside_it_is_refused():
    found = byte_tokenizer([("t", "1")])
    with pytest.raises(UserError, match="merges the number 1 and the text next to it"):
        make_budget_prompts(found, ["x"], TAGS, "at most{budget}", largest=64, max_tokens=999)
    told, _ = make_budget_prompts(
        found, ["x"], TAGS, "at most {budget}", largest=64, max_tokens=999
    )
    assert told.digits == 2


def test_a_chat_template_that_takes_the_sentence_away_is_refused(monkeypatch):
    found = hf_world.chat_tokenizer()
    short = "{% for m in messages %}{{ m.content.split('Think for')[0] }}{% endfor %}"
    monkeypatch.setattr(found, "chat_template", short)
    with pytest.raises(UserError, match="removes the end of the user's message,"):
        make_budget_prompts(found, ["x"], TAGS, WORDS, largest=64, max_tokens=999)
