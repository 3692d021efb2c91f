"""`bacr_jax.load` and `Policy`, on a conditioned model small enough for a test."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import bacr_jax
import hf_world
import thinking_world
from bacr_jax.config import ConditioningConfig
from bacr_jax.errors import UserError
from bacr_jax.evaluation.ask import Session
from bacr_jax.export import policy_folder
from bacr_jax.model.hf import hf_config
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.questions.ledger import ledger_tokenizer

SHAPE = Qwen2Config(27, 16, 24, 2, 2, 1, 8, rope_theta=1e4, tie_embeddings=True, max_positions=64)
KEYS = {
    "rollout.answer_tokens": 3,
    "rollout.chunk": 2,
    "data.train": "ledger",
    "eval.temperature": 2.0,
}
QUESTIONS = ["1a2", "3b4a5"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    conditioning = ConditioningConfig()
    params = hf_world.random_params(SHAPE, conditioning=conditioning)
    module = hf_config.BudgetModule(conditioning, 16)
    budget = policy_folder.BudgetInput(module, levels={"low": 4})
    policy_folder.save_policy(
        path, params, config=SHAPE, budget=budget, tokenizer=ledger_tokenizer()
    )
    return bacr_jax.load(path, overrides=KEYS)


@pytest.fixture(scope="module")
def greedy(policy):
    return policy.generate(QUESTIONS, budget=["low", 12, None])


def test_answers_come_question_by_question_budget_by_budget(greedy):
    asked = [(answer.question, answer.budget, answer.sample) for answer in greedy]
    assert asked == [(q, b, 0) for q, b in itertools.product(QUESTIONS, [4, 12, None])]
    for answer in greedy:
        closing = answer.closed_by != "budget"
        parts = answer.thinking_tokens + answer.forced_tokens + answer.answer_tokens
        assert parts <= len(answer.tokens) <= parts + closing
        assert answer.thinking_tokens <= (answer.budget or 16)


def test_an_answer_comes_without_tags_and_its_text_with_them(policy, greedy):
    for answer in greedy:
        assert answer.answer_text.startswith("<answer>")
        assert answer.answer_text.endswith("</answer>") == answer.finished
        content = answer.answer_text.removeprefix("<answer>").removesuffix("</answer>")
        assert answer.answer == content.strip()
    assert any(answer.answer for answer in greedy)


def test_one_question_alone_is_answered_as_beside_others(policy, greedy):
    assert policy.generate(QUESTIONS[1], budget=12) == [greedy[4]]
    for budget in (np.int64(12), np.array(12), np.array([12]), jnp.array(12)):
        assert policy.generate(QUESTIONS[1], budget=budget) == [greedy[4]]


@pytest.mark.slow
def test_several_samples_differ_and_equal_calls_are_equal(policy):
    drawn = policy.generate(QUESTIONS[0], budget=[4, 12], samples=4)
    assert [answer.sample for answer in drawn] == [0, 1, 2, 3] * 2
    assert len({answer.tokens for answer in drawn}) > 2
    assert policy.generate(QUESTIONS[0], budget=[4, 12], samples=4) == drawn
    assert policy.generate(QUESTIONS[0], budget=[4, 12], samples=4, seed=1) != drawn


def test_a_model_that_thinks_by_itself_is_sampled_by_default(tmp_path, monkeypatch):
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.8}
    base = thinking_world.thinking_folder(
        tmp_path / "base", "qwen3", hf_world.FAMILIES["qwen3"], **sampling
    )
    asked = []

    def spy(self, questions, budgets, *, samples, temperature, top_p, seed):
        asked.append((temperature, top_p))
        return []

    monkeypatch.setattr(Session, "ask", spy)
    overrides = {"data.prompt_format": "native"}
    native = bacr_jax.load(base, overrides=overrides)
    native.generate("q", 4)
    native.generate("q", 4, samples=2)
    native.generate("q", 4, temperature=0)
    native.generate("q", 4, temperature=0.3)
    native.generate("q", 4, top_p=0.4)
    bacr_jax.load(base, overrides={**overrides, "eval.temperature": 0.5}).generate("q", 4)
    bacr_jax.load(base).generate("q", 4)
    bacr_jax.load(base).generate("q", 4, samples=2)
    assert asked == [
        *[(0.7, 0.8), (0.7, 0.8), (0.0, 1.0), (0.3, 1.0), (0.7, 0.4), (0.5, 0.8)],
        # Other prompt formats: greedy, or the defaults of the config.
        *[(0.0, 1.0), (0.6, 0.95)],
    ]


@pytest.mark.parametrize("budget", [4, 12, None])
def test_probabilities_of_the_next_token_sum_to_one_and_greedy_takes_the_largest(
    policy, greedy, budget
):
    answer = next(a for a in greedy if (a.question, a.budget) == (QUESTIONS[1], budget))
    start = answer.tokens[:2]
    found = policy.logprobs([QUESTIONS[1]] * 27, [(*start, i) for i in range(27)], budget)
    last = np.array([score.logprobs[-1] for score in found])
    assert np.exp(last).sum() == pytest.approx(1.0, abs=1e-5)
    assert last.argmax() == answer.tokens[2]
    # What stands before is the same response in all rows.
    np.testing.assert_allclose([s.logprobs[:2] for s in found], [found[0].logprobs[:2]] * 27)


def test_a_response_as_text_is_that_of_its_tokens_and_depends_on_the_budget(policy):
    (text,) = policy.logprobs("1a2", "12", 4)
    for tokens in (text.tokens, np.array(text.tokens), jnp.array(text.tokens)):
        assert policy.logprobs("1a2", [tokens], [4]) == [text]
    assert text.texts == ("1", "2")
    assert text.total == pytest.approx(sum(text.logprobs))
    others = [policy.logprobs("1a2", "12", budget)[0].total for budget in (12, None)]
    assert len({text.total, *others}) == 3


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda p: p.generate("1a2", budget="high"), "budget high: found 'high'"),
        (lambda p: p.generate("1a2", budget=-1), "budget -1: found '-1'"),
        (lambda p: p.generate("1a2", budget=8.0), "budget 8.0: found '8.0'"),
        (lambda p: p.logprobs("1a2", "1", 8.0), "budget 8.0: found '8.0'"),
        (lambda p: p.generate("1a2", budget=[]), "found ''; use whole numbers"),
        (lambda p: p.generate("1a2", budget=60), "the model's 64 positions leave room for"),
        (lambda p: p.generate("1a2", budget=4, samples=0), "samples=0 is too small; use 1 or more"),
        (
            lambda p: p.generate("1a2", 4, samples=2, temperature=0.0),
            "all samples would be the same",
        ),
        (
            lambda p: p.generate("1a2", budget=4, temperature=-1.0),
            "temperature -1.0 is out of range; use 0",
        ),
        (lambda p: p.generate(["1a2", " "], budget=4), "question 1 is empty"),
        (lambda p: p.generate(["1a2", "1" * 2000], budget=4), "question 1: its prompt has more"),
        (lambda p: p.generate("1a2", 4, samples=2.5), "samples=2.5: use a whole number"),
        (lambda p: p.generate("1a2", 4, seed=1.5), "seed=1.5: use a whole number"),
        (lambda p: p.generate("1a2", 4, temperature="hot"), "temperature='hot': use a number"),
        (lambda p: p.generate("1a2", 4, temperature=1.0, top_p=[1]), "top_p=[1]: use a number"),
        (
            lambda p: p.generate(["1a2", 3], 4),
            "questions: found 3; pass a text, or a list of texts",
        ),
        (lambda p: p.generate(None, 4), "questions: found null; pass a text or a list"),
        (lambda p: p.logprobs(7, "1", 4), "questions: found 7; pass a text or a list"),
        (lambda p: p.logprobs("1a2", "1", [4, 12]), "budget: found 2 budgets (4, 12); call"),
        (lambda p: p.logprobs("1a2", "1", "low,none"), "budget: found 2 budgets (4, none); call"),
        (lambda p: p.logprobs("1a2", 5, 4), "responses: found 5; pass a text or a list"),
        (lambda p: p.logprobs("1a2", [5], 4), "response 0: found 5; pass a text, or a list of"),
        (lambda p: p.logprobs("1a2", [5, 6], 4), "response 0: found 5; pass a text, or a list of"),
        (lambda p: p.logprobs("1a2", [[5, 6.5]], 4), "response 0: found [5, 6.5]; pass a text, or"),
        (lambda p: p.logprobs("1a2", [[None]], 4), "response 0: found [None]; pass a text, or a"),
        (lambda p: p.logprobs("1a2", ["1", "2"], 4), "found 1 questions and 2 responses"),
        (lambda p: p.logprobs("1a2", "", 4), "response 0: the response is empty"),
        (lambda p: p.logprobs("1a2", "x y", 4), "response 0: the tokenizer can't encode the text"),
        (
            lambda p: p.logprobs("1a2", [[27]], 4),
            "token id 27 is not one of the model's 27 token ids",
        ),
        (lambda p: p.logprobs("1a2", "1" * 70, 4), "but the model has only 64 positions; use"),
    ],
)
def test_what_can_not_be_used_is_refused_in_a_line(policy, call, says):
    with pytest.raises(UserError) as error:
        call(policy)
    assert says in str(error.value)


def test_a_folder_without_a_policy_is_refused(tmp_path, policy):
    with pytest.raises(UserError, match="contains neither config.yaml nor config.json"):
        bacr_jax.load(tmp_path)
    with pytest.raises(
        UserError, match="step=3 can't be used with a Hugging Face model, because only a run has"
    ):
        bacr_jax.load(policy.folder, step=3)


@pytest.mark.parametrize("key", ["budget.max", "train.steps", "eval.samples"])
def test_a_key_that_changes_no_answer_or_another_policy_is_refused(policy, key):
    with pytest.raises(UserError, match=f"{key} defines the policy, or does not affect"):
        bacr_jax.load(policy.folder, overrides={**KEYS, key: 4})


def test_the_largest_budget_fills_the_models_positions(policy):
    # 64 positions less "<think>", the three characters and the other tokens of the prompt, the
    # forced "</think><answer>", and at most 3 answer tokens.
    prompt = int(policy._session.prompts(["1a2"], [4]).lengths[0])
    largest = 64 - prompt - 2 - 3
    (answer,) = policy.generate("1a2", budget=largest)
    assert answer.thinking_tokens <= largest
    with pytest.raises(UserError, match=f"leave room for only {largest} thinking tokens"):
        policy.generate("1a2", budget=largest + 1)
