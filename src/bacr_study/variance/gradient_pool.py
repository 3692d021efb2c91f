"""Pools of rollouts of a frozen policy: outcomes at every cut, and inner products of scores."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from bacr_jax import advantages, curriculum, rewards
from bacr_jax.config import Config
from bacr_jax.config.derived import drawn as drawn_budgets
from bacr_jax.errors import UserError
from bacr_jax.learner.batch import Batch, make_batch
from bacr_jax.learner.scoring import response_energies
from bacr_jax.methods import load_method
from bacr_jax.prompts.environment import Environment, Questions, build_environment
from bacr_jax.prompts.formats import format_for
from bacr_jax.rollout import Rollout, Rows, Sampler, generate, sampling_params
from bacr_jax.runs import setup
from bacr_jax.runs.checkpoint import read_part
from bacr_jax.runs.folder import RunPaths
from bacr_jax.runs.open import read_config, read_params
from bacr_jax.runs.progress import Phase
from bacr_jax.training.start import tokenizer_of
from bacr_jax.types import Trunks
from bacr_study.variance import sketches
from bacr_study.variance.settings import Regime, VarianceSettings

Params = dict[str, Any]

# Rows decoded together, and rows whose scores are taken in one call.
_SLOTS, _ROWS = 512, 64
# Thinking buffers of scores come in multiples of this.
_BUCKET = 16


# --- the policy -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frozen:
    """A policy as it was at a checkpoint, and all that it needs to answer.

    Attributes:
      head: the value head as it was; None: the method has none.
    """

    config: Config
    step: int
    policy: setup.Policy
    params: Params
    head: Params | None
    environment: Environment

    @property
    def pool_questions(self) -> Questions:
        """Held-out questions."""
        return next(iter(self.environment.eval.values()))


def open_frozen(folder: Path, step: int, environment: Environment | None = None) -> Frozen:
    """Reads a checkpoint of a run; its environment only if it is not given."""
    config = read_config(folder)
    method = load_method(config)
    if environment is None:
        tokenizer, rows = tokenizer_of(config)
        environment = build_environment(config, tokenizer, rows, style=format_for(config))
    policy = setup.make_policy(config, method, environment.vocab_size)
    params = jax.tree.map(jnp.asarray, read_params(folder, step))
    head = None
    if method.uses_value:
        state = RunPaths(folder.absolute()).checkpoints / str(step) / "state"
        head = jax.tree.map(jnp.asarray, read_part(state, "train", "head"))
    return Frozen(config, step, policy, params, head, environment)


# --- rollouts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """Rollouts of rows that each have a question and a budget.

    Attributes:
      surprise: sum over them of (1 - p)^2, p the probability that each was drawn with. It goes
        with the squared norm of the segment's score, and comes with the rollout.
      energy: sum over them of 1 - 2 p + sum_v p(v)^2, the squared norm of a token's score in the
        logits.
      by_answer: outcome of every answer.
    """

    questions: Int[np.ndarray, "B"]
    budgets: Int[np.ndarray, "B"]
    cuts: Int[np.ndarray, "B M"]
    thinking: Int[np.ndarray, "B"]
    tokens: Int[np.ndarray, "B M"]
    surprise: Float[np.ndarray, "B M"]
    energy: Float[np.ndarray, "B M"]
    by_answer: Float[np.ndarray, "B M A"]
    sampled: Int[np.ndarray, "B M A"]

    @staticmethod
    def joined(parts: "list[Drawn]") -> "Drawn":
        """Rows of all parts."""
        names = [field.name for field in dataclasses.fields(Drawn)]
        return Drawn(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in names})

    def only(self, rows: Bool[np.ndarray, "B"]) -> "Drawn":
        """Some of the rows."""
        return Drawn(**{name: x[rows] for name, x in vars(self).items()})


def draw(
    frozen: Frozen,
    questions: Questions,
    rows: Int[np.ndarray, "B"],
    budgets: Int[np.ndarray, "B"],
    key: jax.Array,
    *,
    answers: int,
) -> tuple[Drawn, Rollout]:
    """Traces under budgets, `answers` answers at each of `cuts.count` cuts, and their outcomes."""
    policy, environment = frozen.policy, frozen.environment
    cuts = np.asarray(rewards.cut_points(jnp.asarray(budgets), num_cuts=frozen.config.cuts.count))
    spec = dataclasses.replace(policy.rollout, answers=answers, slots=min(_SLOTS, len(rows)))
    sampling = sampling_params(frozen.config.rollout.temperature)
    rollout = generate(
        policy.decode_params(frozen.params),
        questions.at(rows, budgets),
        Rows(budgets, cuts),
        key,
        Sampler(spec, environment.rules, sampling, policy.phi_of(frozen.params)),
    )
    references = [questions.set.answers[row] for row in rows]
    asked = [questions.set.questions[row] for row in rows]
    shape = (len(rows), cuts.shape[1], answers)
    outcomes = environment.verify(rollout.branches, references, questions=asked).reshape(shape)
    sampled, logprobs = np.asarray(rollout.trunks.sampled), rollout.trunks.logprobs
    surprise = advantages.segment_surprise(*map(jnp.asarray, (logprobs, sampled, cuts)))
    ends = np.minimum(np.concatenate([0 * cuts[:, :1], cuts], 1), sampled[:, None])
    drawn = Drawn(
        questions=rows,
        budgets=budgets,
        cuts=cuts,
        thinking=np.asarray(rollout.trunks.thinking),
        tokens=np.diff(ends, axis=1),
        surprise=np.asarray(surprise),
        energy=_segment_energies(frozen, rollout.trunks, ends),
        by_answer=outcomes,
        sampled=np.asarray(rollout.branches.sampled).reshape(shape),
    )
    return drawn, rollout


def in_portions(
    of_rows: Callable[[np.ndarray], jax.Array], rows: Int[np.ndarray, "n"], size: int
) -> Float[np.ndarray, "n ..."]:
    """What a function makes of rows, always called with `size` of them; some repeat at the end."""
    parts = []
    for start in range(0, len(rows), size):
        index = rows[start : start + size]
        parts.append(np.asarray(of_rows(np.resize(index, size)))[: len(index)])
    return np.concatenate(parts)


def _segment_energies(
    frozen: Frozen, trunks: Trunks, ends: Int[np.ndarray, "B M+1"]
) -> Float[np.ndarray, "B M"]:
    """`Drawn.energy`, by forward passes of the learner over a few rows each."""
    start, sampled = np.asarray(trunks.prompt_lengths), np.asarray(trunks.sampled)
    tokens, budgets = np.asarray(trunks.tokens), np.asarray(trunks.budgets)

    def of_rows(index: np.ndarray) -> jax.Array:
        return response_energies(
            frozen.params,
            *(jnp.asarray(x[index]) for x in (tokens, start, start + sampled, budgets)),
            frozen.environment.rules.allowed_tokens,
            spec=frozen.policy.learner,
        )

    energies = in_portions(of_rows, np.arange(len(tokens)), _ROWS)
    # Nothing is counted before a response: sums up to place i are those of its tokens.
    total = np.concatenate([0 * energies[:, :1], np.cumsum(energies, 1, np.float64)], 1)
    at_ends = np.take_along_axis(total, start[:, None] + ends, 1)
    return np.diff(at_ends, axis=1).astype(np.float32)


def draw_many(
    frozen: Frozen,
    questions: Questions,
    rows: Int[np.ndarray, "B"],
    budgets: Int[np.ndarray, "B"],
    key: jax.Array,
    *,
    answers: int,
    phase: Phase,
) -> Drawn:
    """`draw`, a few thousand rows at a time."""
    parts, size, total = [], 4 * _SLOTS, len(rows)
    for number, start in enumerate(range(0, total, size)):
        part = slice(start, start + size)
        one = jax.random.fold_in(key, number)
        drawn, _ = draw(frozen, questions, rows[part], budgets[part], one, answers=answers)
        parts.append(drawn)
        done, right = min(start + size, total), float(drawn.by_answer.mean())
        phase.update(done, total=total, right=right)
    return Drawn.joined(parts)


def stratified(levels: Int[np.ndarray, "n"], count: int, seed: int) -> Int[np.ndarray, " count"]:
    """Places of questions, as many of each level as can be; UserError: there are fewer."""
    if count > len(levels):
        raise UserError(f"questions={count}: the set has {len(levels)}; write at most that many")
    order = np.random.default_rng([seed, 11]).permutation(len(levels))
    turn = np.zeros(len(levels), int)
    for level in np.unique(levels):
        members = order[levels[order] == level]
        turn[members] = np.arange(len(members))
    return order[np.argsort(turn[order], kind="stable")[:count]]


def draw_budgets(
    config: Config, regime: Regime, grid: tuple[int, ...], questions: int, traces: int, seed: int
) -> Int[np.ndarray, "Q B"]:
    """Budgets of every question's traces: each of the grid, or a draw for each trace.

    The draws are from TruncNorm(mu0, sigma), or, as in training, from `budget.choices`.
    """
    if regime == "common":
        return np.tile(np.repeat(np.array(grid, np.int32), traces), (questions, 1))
    key = jax.random.fold_in(jax.random.key(seed), 17)
    if regime == "training":
        choices = jnp.array(drawn_budgets(config), jnp.int32)
        return np.asarray(curriculum.choice_budgets(key, choices, shape=(questions, traces)))
    drawn = curriculum.sample_budgets(
        key,
        jnp.atleast_1d(jnp.asarray(config.curriculum.mu0, jnp.float32))[:1],
        jnp.zeros(questions, jnp.int32),
        sigma=config.curriculum.sigma,
        b_min=config.budget.min,
        b_max=config.budget.max,
        num_rollouts=traces,
    )
    return np.asarray(drawn)


def save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Writes arrays in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp.npz")
    np.savez(temporary, **arrays)
    temporary.replace(path)


# --- scores ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pool:
    """Rollouts of Q questions, and Gram matrices of their scores by cell.

    A cell is what groups are taken from: N traces of a question, under one budget ("common") or
    under their own (the other regimes).

    Attributes:
      drawn: rows, cell by cell.
      gram: inner products of the segments' scores.
      with_answers: cells of which the answers' scores are known too.
      answer_gram: of these, products of segments, x and y of every cut (`answer_weights`).
    """

    drawn: Drawn
    cell_questions: Int[np.ndarray, " C"]
    gram: Float[np.ndarray, "C N M N M"]
    with_answers: Int[np.ndarray, " H"]
    answer_gram: Float[np.ndarray, "H N V N V"]

    def save(self, path: Path) -> None:
        """Writes it in one step."""
        arrays = vars(self) | vars(self.drawn)
        del arrays["drawn"]
        save_arrays(path, arrays)

    @classmethod
    def load(cls, path: Path) -> "Pool":
        """What `save` wrote."""
        with np.load(path) as saved:
            arrays = dict(saved)
        drawn = Drawn(**{field.name: arrays.pop(field.name) for field in dataclasses.fields(Drawn)})
        return cls(drawn, **arrays)


def _score_rows(
    frozen: Frozen,
    batch: Batch,
    drawn: Drawn,
    with_answers: Bool[np.ndarray, "B"],
    sketch: sketches.CountSketch,
) -> tuple[Float[np.ndarray, "B M k"], Float[np.ndarray, "H V k"]]:
    """Sketches of the segments' scores of all rows, and those of answers of some."""
    spec = dataclasses.replace(frozen.policy.learner, remat="none")
    allowed = frozen.environment.rules.allowed_tokens
    segments = sketches.segment_weights(batch, drawn.cuts)
    rows, cuts, width = segments.shape
    most = np.maximum(np.asarray(batch.sampled), 1)

    def scores(given: Batch, index: np.ndarray, thinking: Any, answers: Any) -> jax.Array:
        """Sketches of rows, in buffers as long as the longest of them needs."""
        length = min(-(-int(most[index].max()) // _BUCKET) * _BUCKET, width)
        part = jax.tree.map(lambda x: np.asarray(x)[index], given)
        short = sketches.shortened(part, length), thinking[..., :length], answers
        return sketches.score_sketches(frozen.params, *short, allowed, sketch, spec=spec)

    plain, none = sketches.without_answers(batch), np.zeros((_ROWS, cuts, 1, 1), np.float32)
    found = np.zeros((rows, cuts, sketch.width), np.float32)
    order = np.argsort(most, kind="stable")
    found[order] = in_portions(lambda i: scores(plain, i, segments[i], none), order, _ROWS)
    chosen = np.flatnonzero(with_answers)
    if not len(chosen):
        return found, np.zeros((0, 2 * cuts, sketch.width), np.float32)
    weights = sketches.answer_weights(batch, drawn.by_answer)
    nothing = np.zeros((_ROWS, 2 * cuts, width), np.float32)
    return found, in_portions(lambda i: scores(batch, i, nothing, weights[i]), chosen, _ROWS)


def _batch(frozen: Frozen, questions: Questions, drawn: Drawn, rollout: Rollout) -> Batch:
    """The rollout as the learner sees it; advantages are zero."""
    rows, width = rollout.trunks.logprobs.shape
    answers = drawn.by_answer.shape[-1]
    zeros = np.zeros((rows, drawn.cuts.shape[1] * answers), np.float32)
    return make_batch(
        questions.at(drawn.questions, drawn.budgets),
        rollout.trunks,
        rollout.branches,
        cuts=np.repeat(drawn.cuts, answers, axis=1),
        thinking_advantages=np.zeros((rows, width), np.float32),
        answer_advantages=zeros,
        returns=zeros,
    )


def _products(vectors: Float[np.ndarray, "N V k"]) -> Float[np.ndarray, "N V N V"]:
    flat = vectors.reshape(-1, vectors.shape[-1])
    return (flat @ flat.T).reshape(*vectors.shape[:2], *vectors.shape[:2])


def make_pool(
    frozen: Frozen,
    settings: VarianceSettings,
    chosen: Int[np.ndarray, "Q"],
    budgets: Int[np.ndarray, "Q B"],
    seed: int,
    regime: Regime,
    phase: Phase,
) -> Pool:
    """Samples a pool, question by question, and keeps inner products of its scores.

    Args:
      chosen: places of the questions.
      budgets: of each question's traces; cells are runs of `settings.traces` of them.
      seed: of rollouts and sketch; the regime enters it.
    """
    traces, answers = settings.traces, settings.answers
    questions = frozen.pool_questions
    sketch = sketches.count_sketch(seed, frozen.params, settings.sketch)
    key = jax.random.fold_in(jax.random.key(seed), 19 + 2 * frozen.step + (regime == "common"))
    at_once = max(_SLOTS * 4 // budgets.shape[1], 1)
    drawn_parts, grams, answer_grams = list[Drawn](), list[np.ndarray](), list[np.ndarray]()
    for start in range(0, len(chosen), at_once):
        part = np.arange(start, min(start + at_once, len(chosen)))
        rows = np.repeat(chosen[part], budgets.shape[1])
        one = jax.random.fold_in(key, start)
        flat = budgets[part].reshape(-1)
        drawn, rollout = draw(frozen, questions, rows, flat, one, answers=answers)
        batch = _batch(frozen, questions, drawn, rollout)
        scored = np.repeat(part < settings.answer_questions, budgets.shape[1])
        found, of_answers = _score_rows(frozen, batch, drawn, scored, sketch)
        grams += map(_products, found.reshape(-1, traces, *found.shape[1:]))
        both = np.concatenate([found[scored], of_answers], 1)
        answer_grams += map(_products, both.reshape(-1, traces, *both.shape[1:]))
        drawn_parts.append(drawn)
        phase.update(len(part) + start, total=len(chosen), right=float(drawn.by_answer.mean()))
    per_question, vectors = budgets.shape[1] // traces, (traces, 3 * frozen.config.cuts.count)
    return Pool(
        drawn=Drawn.joined(drawn_parts),
        cell_questions=np.repeat(chosen, per_question),
        gram=np.stack(grams),
        with_answers=np.arange(min(settings.answer_questions, len(chosen)) * per_question),
        answer_gram=np.array(answer_grams, np.float32).reshape(-1, *vectors, *vectors),
    )
