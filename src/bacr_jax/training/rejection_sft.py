"""A supervised stage on the policy's own correct responses, before reinforcement learning.

SelfBudgeter needs it: a policy that has never written a budget tag can't be rewarded for one. The
responses come from the starting policy in the format all methods share; what is learned is the same
text with the method's opening before it.
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
    run: Run, start: RejectionSFT, plain: Environment, params: Params, poll: Poll
) -> Answered:
    """Samples a response to training questions at the largest budget."""
    config, total = run.config, len(plain.train)
    order = np.random.default_rng([config.seed, 6]).permutation(total)
    asked = np.sort(order[: total if start.questions is None else start.questions])
    rollout = plain_rollout(
        run,
        plain,
        params,
        plain.train.prompts.take(asked),
        jax.random.fold_in(jax.random.key(config.seed), 8),
        Listeners(poll),
        temperature=config.rollout.temperature,
    )
    of = plain.train.set.take(asked)
    right = plain.verify(rollout.branches, of.answers, poll, questions=of.questions)[:, 0]
    correct, lengths = np.zeros(total, np.int64), np.zeros(total, np.int64)
    correct[asked] = right > 0.5
    lengths[asked] = (
        np.asarray(rollout.trunks.thinking) + np.asarray(rollout.branches.sampled)[:, 0]
    )
    return Answered(rollout, asked, correct, lengths)


def examples(
    answered: Answered, environment: Environment, start: RejectionSFT
) -> tuple[Int[np.ndarray, "B S"], Bool[np.ndarray, "B S"]]:
    """Supervised rows from the correct responses that ended by themselves.

        prompt | opening, thinking, closing tag | suffix | answer

    Tokens that the decoding loop would force are not in the loss. Ids are those that were sampled;
    nothing is tokenised again but the opening and the tags.
    """
    trunks, branches = answered.rollout.trunks, answered.rollout.branches
    style = environment.style
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
        rows.append([(prompt, False), (said, True), (suffix, False), (answer.tolist(), True)])
    if not rows:
        raise UserError(
            "selfbudgeter: the starting policy answered no training question correctly; write "
            "another model, or a larger budget.max"
        )
    return padded(rows)


def imitate(
    run: Run,
    start: RejectionSFT,
    params: Params,
    tokens: Int[np.ndarray, "B S"],
    mask: Bool[np.ndarray, "B S"],
    on_progress: OnProgress,
    poll: Poll,
) -> Params:
    """Supervised steps on random rows, at a constant rate after a short rise.

    What is trained of the starting policy, which has no budget module, is donated.
    """
    steps, rows = start.steps, max(start.batch_tokens // tokens.shape[1], 1)

    def batch(step: int, practice: bool) -> tuple[np.ndarray, np.ndarray]:
        del practice  # nothing is taught in stages
        chosen = np.random.default_rng([run.config.seed, 9, step]).integers(len(tokens), size=rows)
        return tokens[chosen], mask[chosen]

    frozen, params = adapters.split(params)
    tx = supervised_optimizer()
    taught = WarmUp(
        run.config,
        batch,
        dataclasses.replace(run.policy.learner, conditioning=None, value=None),
        tx,
        params,
        tx.init(params),
        on_progress,
        poll,
        saved=None,
        frozen=frozen,
        planned=steps,
    )
    taught.advance(steps, lambda i: start.learning_rate * min((i + 1) / min(10, steps), 1.0))
    return {**frozen, **taught.params}


def rejection_sft(
    run: Run, fresh: RunState, plain: Environment, *, on_progress: OnProgress, poll: Poll
) -> tuple[Params, Any, int]:
    """The whole stage: answer, remember, imitate; the policy, the method's state, tokens sampled.

    `plain` has the same questions in the format that all methods share.
    """
    start = run.method.rejection_sft
    assert start is not None
    if plain.train.set.ids != run.environment.train.set.ids:
        raise UserError(
            "data.max_prompt_tokens: drops different questions in the two prompt formats that the "
            "cold start joins; write a larger number"
        )
    params = run.params(fresh.train)
    answered = answer_once(run, start, plain, params, poll)
    method_state = start.update_state(fresh.method_state, answered.lengths, answered.correct)
    tokens, mask = examples(answered, run.environment, start)
    taught = imitate(run, start, params, tokens, mask, on_progress, poll)
    return taught, method_state, int(answered.rollout.counters["tokens"])
