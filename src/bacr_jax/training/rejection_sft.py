"""Fine-tunes the policy on its own correct responses, before reinforcement learning.

The method SelfBudgeter trains the policy to write its budget as a tag. The method needs this stage,
because a policy that never writes the tag can't be rewarded. The starting policy answers the
training questions in the prompt format that all methods share. The policy is then trained on its
correct responses, each preceded by the opening that the method expects, such as a budget tag.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int

from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.learner.supervised import supervised_optimizer
from bacr_jax.methods import RejectionSFT
from bacr_jax.model import adapters
from bacr_jax.prompts.encoding import encode_text
from bacr_jax.prompts.task_data import TaskData
from bacr_jax.questions.ledger.styles import padded
from bacr_jax.rollout import Callbacks, Rollout
from bacr_jax.training.run import Run, RunState, plain_rollout
from bacr_jax.training.warmup import OnProgress, WarmUp
from bacr_jax.types import CLOSED_BY_TAG, Params, Poll

# Folded into the run's seed to select questions, to sample responses, and to draw the rows of each
# supervised step.
_QUESTION_STREAM = 6
_RESPONSE_STREAM = 8
_STEP_STREAM = 9
# Number of steps over which the learning rate rises linearly to its constant value.
_RISE = 10


@dataclasses.dataclass(frozen=True)
class Responses:
    """Responses of the starting policy, one for each selected training question.

    Attributes:
      rollout: the responses, in the order of `questions`.
      questions: indices of the selected questions.
      correct: for each of the n training questions, 1 if its response is correct. 0 if the response
        is wrong or the question was not selected.
      lengths: for each of the n training questions, number of response tokens. 0 if the question
        was not selected.
    """

    rollout: Rollout
    questions: Int[np.ndarray, "B"]
    correct: Int[np.ndarray, "n"]
    lengths: Int[np.ndarray, "n"]


def sample_responses(
    run: Run, settings: RejectionSFT, shared: TaskData, params: Params, poll: Poll
) -> Responses:
    """Samples one response to each selected training question, under the largest budget.

    Args:
      settings: settings of this stage.
      shared: task data in the prompt format that all methods share.
      params: parameters of the starting policy.
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
        Callbacks(poll),
        temperature=config.rollout.temperature,
    )
    sampled_set = shared.train.set.take(questions)
    outcomes = shared.verify(
        rollout.trunks,
        rollout.branches,
        sampled_set.answers,
        poll,
        questions=sampled_set.questions,
    )
    correct = np.zeros(total, np.int64)
    correct[questions] = outcomes[:, 0] > 0.5
    thinking_tokens = np.asarray(rollout.trunks.thinking)
    answer_tokens = np.asarray(rollout.branches.sampled)[:, 0]
    lengths = np.zeros(total, np.int64)
    lengths[questions] = thinking_tokens + answer_tokens
    return Responses(rollout, questions, correct, lengths)


def make_examples(
    responses: Responses, task_data: TaskData, settings: RejectionSFT
) -> tuple[Int[np.ndarray, "B S"], Bool[np.ndarray, "B S"]]:
    """Builds supervised examples from correct responses whose thinking ended with the closing tag.

        prompt | opening, thinking, closing tag | suffix | answer

    The suffix is the forced text between thinking and answer. Thinking and answer keep their
    sampled token ids. Only the opening, the closing tag and the suffix are tokenized here.

    Returns:
      Tokens and loss mask, both with shape [B, S], for B examples padded to the longest length S.
      The mask excludes the prompt, and the suffix because the decoding loop forces its tokens.

    Raises:
      UserError: no response is correct with thinking that ended with the closing tag.
    """
    trunks = responses.rollout.trunks
    branches = responses.rollout.branches
    prompts = task_data.train.prompts

    def encode(text: str) -> list[int]:
        return encode_text(task_data.tokenizer, text).tolist()

    closing = encode(task_data.style.think_close)
    suffix = encode(task_data.style.natural_suffix)
    rows = []
    for row, question in enumerate(responses.questions):
        if not responses.correct[question] or int(trunks.close[row]) != CLOSED_BY_TAG:
            continue
        prompt = np.asarray(prompts.tokens[question])[: int(prompts.lengths[question])].tolist()
        thinking = trunks.thinking_ids(row)[: int(trunks.thinking[row])]
        answer = branches.answer_ids(row, 0)
        opening = encode(settings.opening(int(responses.lengths[question])))
        response = opening + thinking + closing
        rows.append([(prompt, False), (response, True), (suffix, False), (answer, True)])
    if not rows:
        raise UserError(
            "selfbudgeter: the starting policy answered no training question correctly with "
            "thinking closed by the tag, but its supervised steps need such responses; use another "
            "model, or a larger budget.max"
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
    """Trains the policy with supervised learning, on randomly drawn examples in each step.

    The learning rate rises linearly and then stays constant.

    Args:
      params: parameters without a budget module. The trained parameters are donated.
      tokens: tokens of all examples.
      mask: loss mask of all examples.

    Returns:
      All parameters after training.
    """
    batch_size = max(settings.batch_tokens // tokens.shape[1], 1)

    def batch(step: int, practice: bool) -> tuple[np.ndarray, np.ndarray]:
        del practice  # This stage has only one style, so `practice` has no effect.
        rng = np.random.default_rng([run.config.seed, _STEP_STREAM, step])
        rows = rng.integers(len(tokens), size=batch_size)
        return tokens[rows], mask[rows]

    def rate(step: int) -> float:
        return settings.learning_rate * min((step + 1) / min(_RISE, settings.steps), 1.0)

    frozen, trained = adapters.split(params)
    optimizer = supervised_optimizer()
    # Supervised training maximizes the likelihood itself, at any rollout.temperature.
    spec = dataclasses.replace(run.policy.learner, conditioning=None, value=None, temperature=1.0)
    training = WarmUp(
        settings=resolve(run.config).warmup,
        batches=batch,
        spec=spec,
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
    run: Run, fresh: RunState, shared: TaskData, *, on_progress: OnProgress, poll: Poll
) -> tuple[Params, Any, int]:
    """Samples responses, updates the method's state, and trains on the correct responses.

    Args:
      fresh: state of the starting policy.
      shared: task data with the same questions in the prompt format that all methods share.

    Returns:
      The parameters of the policy, the state of the method, and the number of sampled tokens.

    Raises:
      UserError: `data.max_prompt_tokens` excludes different questions in the two prompt formats,
        or no response is correct with thinking that ended with the closing tag.
    """
    settings = run.method.rejection_sft
    assert settings is not None
    if shared.train.set.ids != run.task_data.train.set.ids:
        raise UserError(
            "data.max_prompt_tokens excludes different questions in the two prompt formats that "
            "the supervised steps of selfbudgeter combine; set a larger number"
        )
    params = run.params(fresh.train)
    responses = sample_responses(run, settings, shared, params, poll)
    method_state = settings.update_state(fresh.method_state, responses.lengths, responses.correct)
    tokens, mask = make_examples(responses, run.task_data, settings)
    trained = imitate(run, settings, params, tokens, mask, on_progress, poll)
    return trained, method_state, int(responses.rollout.counters["tokens"])
