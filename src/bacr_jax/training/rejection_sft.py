"""A supervised stage on the policy's own correct responses, before reinforcement learning.

SelfBudgeter needs it: a policy that has never written a budget tag can't be rewarded for one. The
responses come from the starting policy in the format all methods share; what is learned is the same
text with the method's opening before it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int

from bacr_jax.config import Config
from bacr_jax.errors import UserError
from bacr_jax.learner.supervised import supervised_optimizer, supervised_step
from bacr_jax.methods import RejectionSFT
from bacr_jax.model import adapters
from bacr_jax.prompts.encoding import encode_text
from bacr_jax.prompts.environment import Environment
from bacr_jax.prompts.formats import PromptFormat
from bacr_jax.rollout import Listeners, Rollout, Rows, Sampler, generate, sampling_params
from bacr_jax.runs.setup import Policy
from bacr_jax.types import CLOSED_BY_TAG, Poll

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Answered:
    """The starting policy's one response to each training question.

    Attributes:
      asked: their indices.
      correct: by training question; 0 where it was not asked.
      lengths: response tokens by training question; 0 where it was not asked.
    """

    rollout: Rollout
    asked: Int[np.ndarray, "B"]
    correct: Int[np.ndarray, "n"]
    lengths: Int[np.ndarray, "n"]


def answer_once(
    config: Config,
    policy: Policy,
    plain: Environment,
    params: Params,
    *,
    questions: int | None,
    poll: Poll = None,
) -> Answered:
    """Samples a response to every training question at the largest budget."""
    total = len(plain.train)
    order = np.random.default_rng([config.seed, 6]).permutation(total)
    asked = np.sort(order[: total if questions is None else questions])
    budgets = np.full(len(asked), config.budget.max, np.int32)
    rollout = generate(
        policy.plain_decode_params(params),
        plain.train.take(asked),
        Rows(budgets, budgets[:, None]),
        jax.random.fold_in(jax.random.key(config.seed), 8),
        Sampler(
            dataclasses.replace(policy.rollout, conditioning=None),
            plain.rules,
            sampling_params(config.rollout.temperature),
        ),
        Listeners(poll),
    )
    right = plain.verify(
        rollout.branches,
        [plain.train.set.answers[i] for i in asked],
        poll,
        questions=[plain.train.set.questions[i] for i in asked],
    )[:, 0]
    correct, lengths = np.zeros(total, np.int64), np.zeros(total, np.int64)
    correct[asked] = right > 0.5
    lengths[asked] = (
        np.asarray(rollout.trunks.thinking) + np.asarray(rollout.branches.sampled)[:, 0]
    )
    return Answered(rollout, asked, correct, lengths)


def examples(
    answered: Answered, environment: Environment, style: PromptFormat, start: RejectionSFT
) -> tuple[Int[np.ndarray, "B S"], Bool[np.ndarray, "B S"]]:
    """Supervised rows from the correct responses that ended by themselves.

        prompt | opening, thinking, closing tag | suffix | answer

    Tokens that the decoding loop would force are not in the loss. Ids are those that were sampled;
    nothing is tokenised again but the opening and the tags.
    """
    trunks, branches = answered.rollout.trunks, answered.rollout.branches
    encode = lambda text: encode_text(environment.tokenizer, text).tolist()
    closing, suffix = encode(style.think_close), encode(style.natural_suffix)
    rows = []
    for row, question in enumerate(answered.asked):
        if not answered.correct[question] or int(trunks.close[row]) != CLOSED_BY_TAG:
            continue
        prompts = environment.train.prompts
        prompt = np.asarray(prompts.tokens[question])[: int(prompts.lengths[question])].tolist()
        begin, count = int(trunks.prompt_lengths[row]), int(trunks.thinking[row])
        thinking = np.asarray(trunks.tokens[row])[begin : begin + count].tolist()
        at = int(branches.forced[row, 0])
        answer = np.asarray(branches.tokens[row, 0])[at : at + int(branches.sampled[row, 0])]
        said = encode(start.opening(int(answered.lengths[question]))) + thinking + closing
        parts = ((prompt, False), (said, True), (suffix, False), (answer.tolist(), True))
        rows.append(([i for ids, _ in parts for i in ids], [on for ids, on in parts for _ in ids]))
    if not rows:
        raise UserError(
            "selfbudgeter: the starting policy answered no training question correctly; write "
            "another model, or a larger budget.max"
        )
    width = max(len(ids) for ids, _ in rows)
    tokens, mask = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    for row, (ids, on) in enumerate(rows):
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, on
    return tokens, mask


def imitate(
    config: Config,
    policy: Policy,
    params: Params,
    tokens: Int[np.ndarray, "B S"],
    mask: Bool[np.ndarray, "B S"],
    start: RejectionSFT,
    *,
    on_progress: Callable[[int, float], None] | None = None,
    poll: Poll = None,
) -> Params:
    """Supervised steps on random rows, at a constant rate after a short rise.

    Args:
      params: the starting policy, without a budget module; what is trained of it is donated.
    """
    spec = dataclasses.replace(policy.learner, conditioning=None, value=None)
    tx = supervised_optimizer()
    frozen, params = adapters.split(params)
    opt_state = tx.init(params)
    rows = max(start.batch_tokens // tokens.shape[1], 1)
    rise = min(10, start.steps)
    under_way = None
    for step in range(start.steps):
        rng = np.random.default_rng([config.seed, 9, step])
        chosen = rng.integers(len(tokens), size=rows)
        rate = start.learning_rate * min((step + 1) / rise, 1.0)
        params, opt_state, loss = supervised_step(
            params, opt_state, tokens[chosen], mask[chosen], rate, frozen, spec=spec, tx=tx
        )
        # As in the warm-up: a queue of steps would hold the memory of all, and hear of no signal.
        jax.block_until_ready(under_way)
        under_way = loss
        if on_progress is not None and ((step + 1) % 20 == 0 or step + 1 == start.steps):
            on_progress(step + 1, float(loss))
        if poll is not None:
            poll()
    return {**frozen, **params}


def rejection_sft(
    config: Config,
    policy: Policy,
    plain: Environment,
    environment: Environment,
    params: Params,
    method_state: Any,
    start: RejectionSFT,
    *,
    on_progress: Callable[[int, float], None] | None = None,
    poll: Poll = None,
) -> tuple[Params, Any, int]:
    """The whole stage: answer, remember, imitate.

    Args:
      plain: environment in the format that all methods share.
      environment: environment in the method's own format, over the same questions.

    Returns:
      The taught policy, the method's state, and the tokens sampled.
    """
    if plain.train.set.ids != environment.train.set.ids:
        raise UserError(
            "data.max_prompt_tokens: drops different questions in the two prompt formats that the "
            "cold start joins; write a larger number"
        )
    answered = answer_once(config, policy, plain, params, questions=start.questions, poll=poll)
    method_state = start.update_state(method_state, answered.lengths, answered.correct)
    tokens, mask = examples(answered, environment, environment.style, start)
    taught = imitate(
        config, policy, params, tokens, mask, start, on_progress=on_progress, poll=poll
    )
    return taught, method_state, int(answered.rollout.counters["tokens"])
