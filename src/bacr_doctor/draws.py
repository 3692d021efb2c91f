"""Tokens that the run's own sampler draws, compared with the distribution they are drawn from.

`checks` calls `draws`. Its model gives every next token the same known distribution, whatever the
text before it. Whether a real model gives the right distribution is a question for `paths`.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import stats

from bacr_doctor import reference
from bacr_doctor.paths import run_dtype, trial
from bacr_doctor.records import Record, Subject, held
from bacr_jax.config import Config, EvalConfig
from bacr_jax.methods import load_method
from bacr_jax.prompts.decode_rules import DecodeRules, decode_rules
from bacr_jax.prompts.stop_strings import no_stop_string
from bacr_jax.rollout import Rollout, Rows, Sampler, generate, sampling_params
from bacr_jax.runs.setup import Policy, make_policy
from bacr_jax.training.stages import round_keys
from bacr_jax.types import Params, Prompts
from bacr_plan.workload import planned_shape

# 2 rollouts of 32 rows: 4,096 thinking tokens, and as many answer tokens at two cuts.
_ROWS, _THINKING, _ANSWER = 32, 64, 32
_GREEDY_ROWS = 8
_SIZES = {
    "rollout.questions": _ROWS,
    "rollout.group_size": 1,
    # Fewer slots than rows, so that slots are refilled.
    "rollout.slots": 16,
    "rollout.answer_tokens": _ANSWER,
    "rollout.chunk": 16,
    "rollout.windows": 1,
    "budget.max": _THINKING,
    "eval.budgets": (_THINKING,),
    "model.num_layers": 1,
}
# Probability that this check calls a sound machine broken, all of its tests together.
FALSE_ALARM = 1e-6
# Tests of a call: two settings, two paths each with five tests, and one over both paths.
_TEST_LEVEL = FALSE_ALARM / 22
# Tokens that are drawn often. The others share .15 of the mass at temperature 1.
_FREQUENT, _RARE_MASS = 64, 0.15
# Logits of frequent tokens; bfloat16 has steps of 1/16 there.
_LOWEST_LOGIT, _HIGHEST_LOGIT, _LEAST_LOGIT = 9.0, 12.0, 0.25
# Cells of the chi-square test with fewer expected tokens are joined.
_LEAST_EXPECTED = 10.0
# Vocabulary without a run, which is no multiple of the sampler's blocks; the largest on a CPU.
_VOCABULARY, _LARGEST_ON_CPU = 1000, 4096


@dataclass(frozen=True)
class Drawn:
    """Tokens of independent rows under one setting.

    Attributes:
      probabilities: of every token at every step.
      thinking: tokens of the rows' thinking.
      answers: tokens of the answers at two cuts of each row, one sequence per answer.
    """

    setting: str
    probabilities: Float[np.ndarray, "V"]
    thinking: Int[np.ndarray, "rows steps"]
    answers: Int[np.ndarray, "answers steps"]


def draws(subject: Subject) -> Record:
    """Checks the frequencies of drawn tokens, and the independence of rows and steps."""
    dtype, vocabulary = run_dtype(subject), vocabulary_of(subject)
    config = trial(subject, dtype, **_SIZES).config
    # The shape of the trial's model, with the run's vocabulary.
    policy = make_policy(config, load_method(config), vocabulary)
    logits = known_logits(vocabulary, policy.learner.dtype)
    own = subject.config
    run = dataclasses.replace(
        config,
        rollout=dataclasses.replace(config.rollout, temperature=own.rollout.temperature),
        eval=evaluation_sampling(own),
        seed=own.seed,
    )
    training = draw_training(policy, run, logits)
    evaluation, greedy_tokens = draw_evaluation(policy, run, logits)
    wrong = faults(training) + faults(evaluation)
    best = int(np.argmax(np.where(allowed_tokens(vocabulary), logits, -np.inf)))
    if (greedy_tokens != best).any():
        wrong.append("greedy evaluation: not the most likely token")
    count = sum(one.thinking.size + one.answers.size for one in (training, evaluation))
    values = {
        f"{one.setting}, {path}": chi_square(tokens, one.probabilities)
        for one in (training, evaluation)
        for path, tokens in (("thinking", one.thinking), ("answers", one.answers))
    }
    least = min(values.values())
    seen = f"{dtype}, {count:,} tokens of {vocabulary:,} ids: smallest chi-square p {least:.2g}"
    return held(seen, wrong[:3], values)


def vocabulary_of(subject: Subject) -> int:
    """Returns the run's vocabulary size, bounded on a CPU; without a run a size of its own."""
    if not subject.named:
        return _VOCABULARY
    size = planned_shape(subject.config)[0].vocab_size
    return min(size, _LARGEST_ON_CPU) if jax.default_backend() == "cpu" else size


def evaluation_sampling(config: Config) -> EvalConfig:
    """Returns the run's evaluation settings, or the defaults if it samples as training does.

    With equal settings a temperature or a nucleus that is ignored would not be seen.
    """
    asked = config.eval
    as_in_training = asked.top_p == 1 and asked.temperature == config.rollout.temperature
    return EvalConfig() if as_in_training else asked


def known_logits(vocabulary: int, dtype: Any) -> Float[np.ndarray, "V"]:
    """Makes logits of frequent and rare tokens, as `dtype` stores them.

    Frequent tokens are spread over all ids, the first and the last among them, in random order of
    their logits: so that a shift of ids or a missing range is seen.
    """
    count = min(_FREQUENT, vocabulary)
    frequent = np.linspace(0, vocabulary - 1, count).round().astype(int)
    levels = np.linspace(_LOWEST_LOGIT, _HIGHEST_LOGIT, count)
    rare_count = max(vocabulary - count, 1)
    rare_total = np.exp(levels).sum() * _RARE_MASS / (1 - _RARE_MASS)
    rare = max(np.log(rare_total / rare_count), _LEAST_LOGIT)
    logits = np.full(vocabulary, rare)
    logits[frequent] = np.random.default_rng(11).permutation(levels)
    return np.asarray(jnp.asarray(logits, dtype), np.float64)


def allowed_tokens(vocabulary: int) -> Bool[np.ndarray, "V"]:
    """Marks all ids but two as allowed: the second, and one in the middle that is frequent."""
    allowed = np.ones(vocabulary, bool)
    frequent = np.linspace(0, vocabulary - 1, min(_FREQUENT, vocabulary)).round().astype(int)
    allowed[[1, frequent[len(frequent) // 2]]] = False
    return allowed


def probabilities_of(
    logits: Float[np.ndarray, "V"],
    allowed: Bool[np.ndarray, "V"],
    temperature: float,
    top_p: float,
) -> Float[np.ndarray, "V"]:
    """Returns the distribution at a temperature, cut to its nucleus; ties go by token id."""
    scaled = np.where(allowed, logits / temperature, -np.inf)
    mass = np.exp(scaled - scaled.max())
    mass /= mass.sum()
    order = np.lexsort((np.arange(len(mass)), -mass))
    before = np.cumsum(mass[order]) - mass[order]
    mass[order[before >= top_p]] = 0.0
    return mass / mass.sum()


def constant_params(policy: Policy, logits: Float[np.ndarray, "V"]) -> Params:
    """Makes parameters under which the next token's logits are `logits` after every text.

    All kernels are zero, so a block changes nothing. Every embedding is a multiple of a vector of
    ones, which the final norm makes that vector; the tied head multiplies it by the embedding.
    """
    params = jax.tree.map(np.zeros_like, reference.random_params(policy.learner.model))
    width = params["embed"].shape[1]
    params["embed"] = np.repeat(logits[:, None], width, axis=1).astype(np.float32)
    params["final_norm"] = np.full(width, 1 / width, np.float32)
    return jax.tree.map(jnp.asarray, params)


def _rules(vocabulary: int) -> DecodeRules:
    """Makes rules under which nothing ends a row but its budget."""
    never = no_stop_string(vocabulary)
    return decode_rules(
        allowed_tokens=allowed_tokens(vocabulary),
        eos_ids=[],
        think_close=never,
        answer_close=never,
        forced_suffix=[2, 3],
        natural_suffix=[3],
    )


def _prompts(count: int) -> Prompts:
    """Makes prompts of one and two tokens."""
    lengths = 1 + np.arange(count, dtype=np.int32) % 2
    tokens = np.full((count, 2), 4, np.int32)
    return Prompts(*map(jnp.asarray, (tokens, lengths, 0 * lengths, lengths)))


def _budgets(count: int) -> dict[str, np.ndarray]:
    """Returns the same budget for every row, with a cut in the middle and one at the end."""
    budgets = np.full(count, _THINKING, np.int32)
    return {"budgets": budgets, "cuts": np.stack([budgets // 2, budgets], axis=1)}


def _tokens(rollout: Rollout, rows: slice) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sampled tokens of some rows: of their thinking, and of their answers."""
    trunks, branches = rollout.trunks, rollout.branches
    starts = np.asarray(trunks.prompt_lengths)[rows, None] + np.arange(_THINKING)
    thinking = np.take_along_axis(np.asarray(trunks.tokens)[rows], starts, axis=1)
    forced = np.asarray(branches.forced)[rows, :, None] + np.arange(_ANSWER)
    answers = np.take_along_axis(np.asarray(branches.tokens)[rows], forced, axis=2)
    return thinking, answers.reshape(-1, _ANSWER)


def draw_training(policy: Policy, config: Config, logits: Float[np.ndarray, "V"]) -> Drawn:
    """Samples the rollouts of a run's first two steps."""
    vocabulary, temperature = len(logits), config.rollout.temperature
    params = constant_params(policy, logits)
    sampler = Sampler(
        policy.rollout, _rules(vocabulary), sampling_params(temperature), policy.phi_of(params)
    )
    run_key = jax.random.fold_in(jax.random.key(config.seed), 1)
    parts = []
    for step in (1, 2):
        key = round_keys(run_key, step, 0)[1]
        rows = Rows(**_budgets(_ROWS))
        copy = policy.decode_params(params)
        parts.append(_tokens(generate(copy, _prompts(_ROWS), rows, key, sampler), slice(None)))
    thinking, answers = (np.concatenate(both) for both in zip(*parts))
    allowed = allowed_tokens(vocabulary)
    probabilities = probabilities_of(logits, allowed, temperature, 1.0)
    return Drawn("training", probabilities, thinking, answers)


def draw_evaluation(
    policy: Policy, config: Config, logits: Float[np.ndarray, "V"]
) -> tuple[Drawn, np.ndarray]:
    """Samples an evaluation: greedy rows, and sampled rows under two keys.

    Returns:
      The sampled rows, and all tokens of the greedy ones.
    """
    vocabulary, asked = len(logits), config.eval
    params = constant_params(policy, logits)
    counts = [_GREEDY_ROWS, _ROWS, _ROWS]
    sampling = sampling_params([0.0, asked.temperature, asked.temperature], asked.top_p)
    sampler = Sampler(policy.evaluation, _rules(vocabulary), sampling, policy.phi_of(params))
    rows = Rows(
        **_budgets(sum(counts)),
        # The same questions in each part.
        ids=np.concatenate([np.arange(count) for count in counts]),
        streams=np.repeat(np.arange(3), counts),
    )
    base = jax.random.fold_in(jax.random.key(config.seed), 4)
    keys = jnp.stack([jax.random.fold_in(base, number) for number in (0, 1, 2)])
    copy = policy.decode_params(params)
    rollout = generate(copy, _prompts(sum(counts)), rows, keys, sampler)
    greedy = np.concatenate([x.ravel() for x in _tokens(rollout, slice(0, _GREEDY_ROWS))])
    thinking, answers = _tokens(rollout, slice(_GREEDY_ROWS, None))
    allowed = allowed_tokens(vocabulary)
    probabilities = probabilities_of(logits, allowed, asked.temperature, asked.top_p)
    return Drawn("evaluation", probabilities, thinking, answers), greedy


def faults(drawn: Drawn) -> list[str]:
    """Tests the tokens of a setting; each fault names its path and what was counted."""
    found = []
    for path, tokens in (("thinking", drawn.thinking), ("answers", drawn.answers)):
        place = f"{drawn.setting}, {path}"
        if chi_square(tokens, drawn.probabilities) < _TEST_LEVEL:
            found.append(f"{place}: {frequency_fault(tokens, drawn.probabilities)}")
        for kind, sequences in (("rows", tokens), ("steps", tokens.T)):
            if fault := agreement_fault(sequences, drawn.probabilities):
                found.append(f"{place}: {kind} {fault}")
    steps = drawn.answers.shape[1]
    both = np.concatenate([drawn.thinking[:, :steps], drawn.answers])
    # Rows of one path were compared above.
    if not found and (fault := agreement_fault(both, drawn.probabilities)):
        found.append(f"{drawn.setting}: thinking and answers: rows {fault}")
    return found


def chi_square(tokens: np.ndarray, probabilities: Float[np.ndarray, "V"]) -> float:
    """Returns the p-value of the tokens' frequencies; 0 if one of them has no probability."""
    counts = np.bincount(tokens.ravel(), minlength=len(probabilities))
    if counts[probabilities == 0].any():
        return 0.0
    expected = tokens.size * probabilities
    # Neighbouring ids are joined until a cell is large enough.
    cells = cells_of(expected)
    if cells.max() == 0:
        return 1.0
    observed = np.bincount(cells, counts)
    wanted = np.bincount(cells, expected)
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    return float(stats.chi2.sf(statistic, cells.max()))


def cells_of(expected: Float[np.ndarray, "V"]) -> Int[np.ndarray, "V"]:
    """Numbers the cell of each id: one of its own if it is frequent, else one with neighbours."""
    cells = np.zeros(len(expected), int)
    number = 0
    for own in (True, False):
        total = 0.0
        for index in np.flatnonzero((expected >= _LEAST_EXPECTED) == own):
            cells[index] = number
            total += expected[index]
            if total >= _LEAST_EXPECTED:
                number += 1
                total = 0.0
    # What is left over joins the last full cell.
    return np.minimum(cells, max(number - 1, 0))


def frequency_fault(tokens: np.ndarray, probabilities: Float[np.ndarray, "V"]) -> str:
    """Describes the range of ids whose count is furthest from what was expected."""
    count, size = tokens.size, len(probabilities)
    halves = ((0, size // 2), (size // 2, size))
    shares = [
        f"ids {start} to {stop - 1} {np.mean((tokens >= start) & (tokens < stop)):.1%} "
        f"(expected {probabilities[start:stop].sum():.1%})"
        for start, stop in halves
    ]
    impossible = int((probabilities[tokens] == 0).sum())
    more = f"; {impossible} that may not be drawn" if impossible else ""
    return f"{count:,} tokens are not from their distribution: {', '.join(shares)}{more}"


def agreement_fault(
    sequences: Int[np.ndarray, "n T"], probabilities: Float[np.ndarray, "V"]
) -> str:
    """Tests whether sequences agree as often as independent ones do; "" if they do.

    The number of places at which two independent sequences agree is binomial. Each pair is tested
    for too many, and disjoint neighbours together for too many or too few.
    """
    count, length = sequences.shape
    rate = min(float((probabilities**2).sum()), 1.0)
    agreeing = np.zeros((count, count), int)
    for step in range(length):
        agreeing += sequences[:, step, None] == sequences[None, :, step]
    first, second = np.triu_indices(count, 1)
    pairs = agreeing[first, second]
    most = int(np.argmax(pairs))
    if stats.binom.sf(pairs[most] - 1, length, rate) < _TEST_LEVEL / len(pairs):
        return (
            f"{first[most]} and {second[most]} share {pairs[most]} of {length} tokens, where "
            f"independent ones share {rate * length:.1f}"
        )
    neighbours = agreeing[np.arange(0, count - 1, 2), np.arange(1, count, 2)].sum()
    trials = count // 2 * length
    if stats.binomtest(int(neighbours), trials, rate).pvalue < _TEST_LEVEL:
        return (
            f"next to each other share {neighbours} of {trials} tokens, where independent ones "
            f"share {rate * trials:.1f}"
        )
    return ""
