"""Supervised stage on the policy's own correct responses, before reinforcement learning.

SelfBudgeter needs this stage because a policy that never writes a budget tag can't be rewarded for
one. The starting policy answers in the format that all methods share. It then learns the same
responses with the method's opening before them.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int

from bacr_jax.errors import UserError
from bacr_jax.learner.supervised import supervised_optimizer
from bacr_jax.methods import RejectionSFT
from bacr_jax.model import adapters
from bacr_jax.prompts.encoding import encode_text
from bacr_jax.prompts.environment import Environment
from bacr_jax.questions.ledger.styles import padded
from bacr_jax.rollout import Listeners, Rollout
from bacr_jax.training.run import Run, RunState, plain_rollout
from bacr_jax.training.warmup import OnProgress, WarmUp
from bacr_jax.types import CLOSED_BY_TAG, Params, Poll

# Random streams of the seed: selected questions, responses, and rows of the supervised steps.
_QUESTION_STREAM = 6
_RESPONSE_STREAM = 8
_STEP_STREAM = 9
# Steps in which the learning rate rises to its constant value.
_RISE = 10


@dataclasses.dataclass(frozen=True)
class Responses:
    """The starting policy's responses, one per sampled training question.

    Attributes:
      rollout: rows in the order of `questions`.
      questions: indices of the questions that were sampled.
      correct: 1 or 0 for each of the n training questions; 0 if it was not sampled.
      lengths: response tokens for each training question; 0 if it was not sampled.
    """

    rollout: Rollout
    questions: Int[np.ndarray, "B"]
    correct: Int[np.ndarray, "n"]
    lengths: Int[np.ndarray, "n"]


def sample_responses(
    run: Run, settings: RejectionSFT, shared: Environment, params: Params, poll: Poll
) -> Responses:
    """Samples one response to each selected training question, under the largest budget.

    Args:
      shared: environment in the format that all methods share.
    """
    config = run.config
    total = len(shared.train)
    count = total if settings.questions is None else settings.questions
    order = np.random.default_rng([config.seed, _QUESTION_STREAM]).permutation(total)
    questions = np.sort(order[:count])
    rollout = plain_rollout(
        run,
        shared,
        params,
        shared.train.prompts.take(questions),
        jax.random.fold_in(jax.random.key(config.seed), _RESPONSE_STREAM),
        Listeners(poll),
        temperature=config.rollout.temperature,
    )
    sampled_set = shared.train.set.take(questions)
    outcomes = shared.verify(
        rollout.branches, sampled_set.answers, poll, questions=sampled_set.questions
    )
    correct = np.zeros(total, np.int64)
    correct[questions] = outcomes[:, 0] > 0.5
    thinking_tokens = np.asarray(rollout.trunks.thinking)
    answer_tokens = np.asarray(rollout.branches.sampled)[:, 0]
    lengths = np.zeros(total, np.int64)
    lengths[questions] = thinking_tokens + answer_tokens
    return Responses(rollout, questions, correct, lengths)


def make_examples(
    responses: Responses, environment: Environment, settings: RejectionSFT
) -> tuple[Int[np.ndarray, "B S"], Bool[np.ndarray, "B S"]]:
    """Returns supervised rows of the correct responses that closed their thinking themselves.

        prompt | opening, thinking, closing tag | suffix | answer

    The ids of thinking and answer are the sampled ones; only the opening, the tags and the suffix
    are tokenised.

    Returns:
      Tokens, and the loss mask. The mask excludes the prompt and the suffix, which the decoding
      loop forces.

    Raises:
      UserError: no response is correct.
    """
    trunks = responses.rollout.trunks
    branches = responses.rollout.branches
    prompts = environment.train.prompts

    def encode(text: str) -> list[int]:
        return encode_text(environment.tokenizer, text).tolist()

    closing = encode(environment.style.think_close)
    suffix = encode(environment.style.natural_suffix)
    rows = []
    for row, question in enumerate(responses.questions):
        if not responses.correct[question] or int(trunks.close[row]) != CLOSED_BY_TAG:
            continue
        prompt = np.asarray(prompts.tokens[question])[: int(prompts.lengths[question])].tolist()
        thinking_start = int(trunks.prompt_lengths[row])
        thinking_end = thinking_start + int(trunks.thinking[row])
        thinking = np.asarray(trunks.tokens[row])[thinking_start:thinking_end].tolist()
        answer_start = int(branches.forced[row, 0])
        answer_end = answer_start + int(branches.sampled[row, 0])
        answer = np.asarray(branches.tokens[row, 0])[answer_start:answer_end].tolist()
        opening = encode(settings.opening(int(responses.lengths[question])))
        response = opening + thinking + closing
        rows.append([(prompt, False), (response, True), (suffix, False), (answer, True)])
    if not rows:
        raise UserError(
            "selfbudgeter: the starting policy answered no training question correctly; write "
            "another model, or a larger budget.max"
        )
    return padded(rows)


def imitate(
    run: Run,
    settings: RejectionSFT,
    params: Params,
    tokens: Int[np.ndarray, "B S"],
    mask: Bool[np.ndarray, "B S"],
    on_progress: OnProgress,
    poll: Poll,
) -> Params:
    """Trains on random rows, with a learning rate that rises for ten steps and is then constant.

    Args:
      params: parameters without a budget module. The trained ones are donated.
    """
    batch_size = max(settings.batch_tokens // tokens.shape[1], 1)

    def batch(step: int, practice: bool) -> tuple[np.ndarray, np.ndarray]:
        del practice  # This stage has one style only.
        rng = np.random.default_rng([run.config.seed, _STEP_STREAM, step])
        rows = rng.integers(len(tokens), size=batch_size)
        return tokens[rows], mask[rows]

    def rate(step: int) -> float:
        return settings.learning_rate * min((step + 1) / min(_RISE, settings.steps), 1.0)

    frozen, trained = adapters.split(params)
    optimizer = supervised_optimizer()
    training = WarmUp(
        config=run.config,
        batches=batch,
        spec=dataclasses.replace(run.policy.learner, conditioning=None, value=None),
        tx=optimizer,
        params=trained,
        opt_state=optimizer.init(trained),
        on_progress=on_progress,
        poll=poll,
        saved=None,
        frozen=frozen,
        planned=settings.steps,
    )
    training.advance(settings.steps, rate)
    return {**frozen, **training.params}


def rejection_sft(
    run: Run, fresh: RunState, shared: Environment, *, on_progress: OnProgress, poll: Poll
) -> tuple[Params, Any, int]:
    """Runs the whole stage: samples responses, updates the method's state, and imitates.

    Args:
      fresh: state of the starting policy.
      shared: environment with the same questions, in the format that all methods share.

    Returns:
      Parameters of the policy, the method's state, and the number of sampled tokens.

    Raises:
      UserError: the two formats have different questions, or no response is correct.
    """
    settings = run.method.rejection_sft
    assert settings is not None
    if shared.train.set.ids != run.environment.train.set.ids:
        raise UserError(
            "data.max_prompt_tokens: drops different questions in the two prompt formats that the "
            "cold start joins; write a larger number"
        )
    params = run.params(fresh.train)
    responses = sample_responses(run, settings, shared, params, poll)
    method_state = settings.update_state(fresh.method_state, responses.lengths, responses.correct)
    tokens, mask = make_examples(responses, run.environment, settings)
    trained = imitate(run, settings, params, tokens, mask, on_progress, poll)
    return trained, method_state, int(responses.rollout.counters["tokens"])
