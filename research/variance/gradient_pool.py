"""Samples pools of rollouts from a frozen policy, with outcomes and inner products of scores."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from bacr_jax import advantages, curriculum, rewards
from bacr_jax.config import Config
from bacr_jax.config.derived import drawn as drawn_budgets
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.learner.batch import Batch, make_batch, narrowed
from bacr_jax.learner.scoring import in_portions, thinking_energies
from bacr_jax.methods import load_method
from bacr_jax.prompts.prompted_questions import PromptedQuestions
from bacr_jax.prompts.task_data import TaskData
from bacr_jax.rollout import Rollout, RolloutRequest, SamplingSetup, generate, sampling_params
from bacr_jax.runs import setup
from bacr_jax.runs.checkpoint import read_part
from bacr_jax.runs.folder import RunPaths
from bacr_jax.runs.progress import Progress
from bacr_jax.types import Params
from research.variance import sketches
from research.variance.settings import Regime, VarianceSettings

# Number of rows that are decoded at the same time, that are sampled per call, and whose scores are
# computed per call.
_SLOTS, _DRAWN_AT_ONCE, _ROWS = 512, 2048, 64
# The lengths of the thinking buffers for scores are multiples of this number of tokens.
_BUCKET = 16


@dataclass(frozen=True)
class Frozen:
    """The policy and the value head of a checkpoint, with everything needed to sample from it."""

    config: Config
    step: int
    policy: setup.Policy
    params: Params
    head: Params
    task_data: TaskData

    @property
    def pool_questions(self) -> PromptedQuestions:
        """Returns the held-out questions, from the first evaluation set."""
        return next(iter(self.task_data.eval.values()))


def open_frozen(config: Config, folder: Path, step: int, task_data: TaskData) -> Frozen:
    """Loads a checkpoint of a run whose method has a value head."""
    settings = resolve(config)
    method = load_method(settings.method)
    policy = setup.make_policy(settings.policy, method, task_data.vocab_size)
    state = RunPaths(folder.absolute()).checkpoints / str(step) / "state"
    params, head = (
        jax.tree.map(jnp.asarray, read_part(state, "train", name)) for name in ("policy", "head")
    )
    return Frozen(config, step, policy, params, head, task_data)


# --- rollouts -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rollouts:
    """Rollouts with their budgets, cuts and outcomes.

    Attributes:
      tokens: number of sampled tokens in each segment.
      surprise: sum of (1 - p)^2 over the tokens of a segment, where p is the probability
        with which a token was sampled. It is a proxy for the squared norm of the segment's score,
        and needs no additional computation.
      energy: sum of 1 - 2 p + sum_v p(v)^2 over the tokens of a segment. A term is the squared norm
        of the token's score with respect to the logits.
      by_answer: outcome of every answer.
    """

    budgets: Int[np.ndarray, "*rows"]
    cuts: Int[np.ndarray, "*rows M"]
    thinking: Int[np.ndarray, "*rows"]
    tokens: Int[np.ndarray, "*rows M"]
    surprise: Float[np.ndarray, "*rows M"]
    energy: Float[np.ndarray, "*rows M"]
    by_answer: Float[np.ndarray, "*rows M A"]


@dataclass(frozen=True)
class Drawn(Rollouts):
    """Rollouts with the question of each row. `sampled` is the number of tokens of each answer."""

    questions: Int[np.ndarray, "B"]
    sampled: Int[np.ndarray, "B M A"]

    @staticmethod
    def joined(parts: "Sequence[Drawn]") -> "Drawn":
        """Concatenates the rows of several parts."""
        columns = {name: [vars(part)[name] for part in parts] for name in vars(parts[0])}
        return Drawn(**{name: np.concatenate(column) for name, column in columns.items()})

    def only(self, rows: Bool[np.ndarray, "B"]) -> "Drawn":
        """Returns the selected rows."""
        return Drawn(**{name: x[rows] for name, x in vars(self).items()})


@dataclass(frozen=True)
class Pool(Drawn):
    """Rollouts of Q questions in cells, and the Gram matrices of their scores.

    A cell contains N traces of one question, from which groups are formed. In the regime common,
    all traces of a cell have the same budget. In the other regimes, each trace has a different
    budget.

    Attributes:
      cell_questions: question of each cell.
      gram: inner products of the scores of all segments in each cell.
      with_answers: indices of the cells for which the scores of the answers are available too.
      answer_gram: for these cells, inner products of the scores of the segments and of the vectors
        x and y of every cut (`answer_weights`).
    """

    cell_questions: Int[np.ndarray, " C"]
    gram: Float[np.ndarray, "C N M N M"]
    with_answers: Int[np.ndarray, " H"]
    answer_gram: Float[np.ndarray, "H N V N V"]


def draw(
    frozen: Frozen,
    questions: PromptedQuestions,
    rows: Int[np.ndarray, "B"],
    budgets: Int[np.ndarray, "B"],
    key: jax.Array,
    *,
    answers: int,
) -> tuple[Drawn, Rollout]:
    """Samples and grades rollouts with the given budgets.

    Each trace has `cuts.count` cuts, with `answers` answers per cut.
    """
    policy, task_data = frozen.policy, frozen.task_data
    cuts = np.asarray(rewards.cut_points(jnp.asarray(budgets), num_cuts=frozen.config.cuts.count))
    spec = dataclasses.replace(policy.rollout, answers=answers, slots=min(_SLOTS, len(rows)))
    sampling = sampling_params(frozen.config.rollout.temperature)
    rollout = generate(
        policy.decode_params(frozen.params),
        questions.at(rows, budgets),
        RolloutRequest(budgets, cuts),
        key,
        SamplingSetup(spec, task_data.rules, sampling, policy.phi_of(frozen.params)),
    )
    references = [questions.set.answers[row] for row in rows]
    asked = [questions.set.questions[row] for row in rows]
    shape = (len(rows), cuts.shape[1], answers)
    outcomes = task_data.verify(
        rollout.trunks, rollout.branches, references, questions=asked
    ).reshape(shape)
    sampled, logprobs = np.asarray(rollout.trunks.sampled), rollout.trunks.logprobs
    surprise = advantages.segment_score_norm_proxy(*map(jnp.asarray, (logprobs, sampled, cuts)))
    ends = np.minimum(np.concatenate([0 * cuts[:, :1], cuts], 1), sampled[:, None])
    energies = thinking_energies(
        frozen.params, rollout.trunks, task_data.rules.allowed_tokens, spec=policy.learner
    )
    total = np.concatenate([0 * energies[:, :1], np.cumsum(energies, 1, np.float64)], 1)
    drawn = Drawn(
        questions=rows,
        budgets=budgets,
        cuts=cuts,
        thinking=np.asarray(rollout.trunks.thinking),
        tokens=np.diff(ends, axis=1),
        surprise=np.asarray(surprise),
        energy=np.diff(np.take_along_axis(total, ends, 1), axis=1).astype(np.float32),
        by_answer=outcomes,
        sampled=np.asarray(rollout.branches.sampled).reshape(shape),
    )
    return drawn, rollout


def stratified(levels: Int[np.ndarray, "n"], count: int, seed: int) -> Int[np.ndarray, " count"]:
    """Samples questions that are distributed as evenly as possible over the levels.

    Returns:
      Indices of the questions.

    Raises:
      UserError: if there are fewer than `count` questions.
    """
    if count > len(levels):
        raise UserError(f"questions={count}: the set has {len(levels)}; use at most that many")
    order = np.random.default_rng([seed, 11]).permutation(len(levels))
    turn = np.zeros(len(levels), int)
    for level in np.unique(levels):
        members = order[levels[order] == level]
        turn[members] = np.arange(len(members))
    return order[np.argsort(turn[order], kind="stable")[:count]]


def draw_budgets(
    config: Config, regime: Regime, grid: tuple[int, ...], questions: int, traces: int, seed: int
) -> Int[np.ndarray, "Q B"]:
    """Returns the budgets for the traces of each question, as the regime defines them."""
    if regime == "common":
        return np.tile(np.repeat(np.array(grid, np.int32), traces), (questions, 1))
    key = jax.random.fold_in(jax.random.key(seed), 17)
    if regime == "training":
        choices = jnp.array(drawn_budgets(config.budget, config.eval.budgets), jnp.int32)
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


# --- scores ---------------------------------------------------------------------------------------


def _score_rows(
    frozen: Frozen, drawn: Drawn, rollout: Rollout, answered: int, sketch: sketches.CountSketch
) -> tuple[Float[np.ndarray, "B M k"], Float[np.ndarray, "H V k"]]:
    """Computes sketches of scores: of the segments for all rows, and of answers for the first rows.

    `answered` is the number of rows for which the answers' scores are computed.
    """
    spec = dataclasses.replace(frozen.policy.learner, remat="none")
    batch = _batch(frozen, drawn, rollout)
    allowed = frozen.task_data.rules.allowed_tokens
    segments = sketches.segment_weights(batch, drawn.cuts)
    rows, cuts, width = segments.shape
    most = np.maximum(np.asarray(batch.sampled), 1)

    def scores(given: Batch, index: np.ndarray, thinking: Any, answers: Any) -> jax.Array:
        """Computes sketches of some rows, with buffers as long as the longest of these rows."""
        length = min(-(-int(most[index].max()) // _BUCKET) * _BUCKET, width)
        part = jax.tree.map(lambda x: np.asarray(x)[index], given)
        trunk = part.trunk.shape[1] - width + length
        short = narrowed(part, trunk, length), thinking[..., :length], answers
        return sketches.score_sketches(frozen.params, *short, allowed, sketch, spec=spec)

    plain, none = sketches.without_answers(batch), np.zeros((_ROWS, cuts, 1, 1), np.float32)
    found = np.zeros((rows, cuts, sketch.width), np.float32)
    order = np.argsort(most, kind="stable")
    found[order] = in_portions(lambda i: scores(plain, i, segments[i], none), order, _ROWS)
    if not answered:
        return found, np.zeros((0, 2 * cuts, sketch.width), np.float32)
    weights = sketches.answer_weights(batch, drawn.by_answer)
    nothing = np.zeros((_ROWS, 2 * cuts, width), np.float32)
    first = np.arange(rows)[:answered]
    return found, in_portions(lambda i: scores(batch, i, nothing, weights[i]), first, _ROWS)


def _batch(frozen: Frozen, drawn: Drawn, rollout: Rollout) -> Batch:
    """Converts a rollout of the pool's questions to a learner batch with zero advantages."""
    rows, width = rollout.trunks.logprobs.shape
    answers = drawn.by_answer.shape[-1]
    zeros = np.zeros((rows, drawn.cuts.shape[1] * answers), np.float32)
    return make_batch(
        frozen.pool_questions.at(drawn.questions, drawn.budgets),
        rollout.trunks,
        rollout.branches,
        cuts=np.repeat(drawn.cuts, answers, axis=1),
        thinking_advantages=np.zeros((rows, width), np.float32),
        answer_advantages=zeros,
        value_targets=zeros,
    )


def _products(vectors: Float[np.ndarray, "N V k"]) -> Float[np.ndarray, "N V N V"]:
    flat = vectors.reshape(-1, vectors.shape[-1])
    return (flat @ flat.T).reshape(*vectors.shape[:2], *vectors.shape[:2])


# --- what a study draws ---------------------------------------------------------------------------

# Settings on which the content of each file depends. `_ALL_DEPEND` lists the settings on which all
# files depend.
_DEPENDS = {
    "pool": ("traces", "answers", "answer_questions", "sketch"),
    "calibration": ("calibration", "calibration_traces", "answers"),
    "oracle": ("oracle",),
}
_ALL_DEPEND = ("config", "overrides", "questions", "budgets")


class _Asked(NamedTuple):
    """Questions to sample from, each with its list of budgets."""

    questions: PromptedQuestions
    chosen: Int[np.ndarray, "Q"]
    budgets: Int[np.ndarray, "Q N"]
    answers: int


@dataclass(frozen=True)
class Draws:
    """Samples rollouts from a frozen policy in one regime of budgets, and caches them in files."""

    settings: VarianceSettings
    frozen: Frozen
    regime: Regime
    seed: int
    folder: Path
    progress: Progress

    def pool(self) -> Pool:
        """Returns rollouts of the pool's questions, with the inner products of their scores."""
        return Pool(**self._kept("pool", self._make_pool))

    def calibration(self) -> Drawn:
        """Returns rollouts of training questions.

        In the regime common, all traces of a question have the same budget.
        """
        settings, train = self.settings, self.frozen.task_data.train
        count, traces = settings.calibration, settings.calibration_traces
        order = np.random.default_rng([self.seed, 13]).permutation(len(train))[:count]
        if len(order) < count:
            raise UserError(f"calibration={count}: there are {len(order)} training questions")
        budgets = self._budgets(count, traces, self.seed + 1)[:, :traces]
        if self.regime == "common":
            turns = np.resize(np.array(settings.budgets, np.int32), count)
            budgets = np.repeat(turns[:, None], traces, 1)
        return self._drawn("calibration", _Asked(train, order, budgets, settings.answers))

    @property
    def second(self) -> Bool[np.ndarray, "B"]:
        """Mask of the second half of the calibration rows.

        This half is used for early stopping of fits, and for computing moments.
        """
        period = len(self.settings.budgets) if self.regime == "common" else 4
        half = np.arange(self.settings.calibration) // period % 2 == 1
        return np.repeat(half, self.settings.calibration_traces)

    def oracle(self) -> Drawn:
        """Returns additional rollouts of the pool's questions."""
        budgets = self._budgets(self.settings.questions, self.settings.oracle, self.seed + 2)
        return self._drawn("oracle", _Asked(self.frozen.pool_questions, self._chosen, budgets, 1))

    @property
    def _chosen(self) -> Int[np.ndarray, "Q"]:
        """Indices of the pool's questions."""
        levels = np.asarray(self.frozen.pool_questions.set.levels)
        return stratified(levels, self.settings.questions, self.seed)

    def _budgets(self, questions: int, traces: int, seed: int) -> Int[np.ndarray, "Q B"]:
        config, grid = self.frozen.config, self.settings.budgets
        return draw_budgets(config, self.regime, grid, questions, traces, seed)

    def _kept(self, name: str, make: Callable[[], Drawn]) -> dict[str, np.ndarray]:
        """Loads the arrays of a file. If the file is missing, computes them and writes it."""
        known = (*_ALL_DEPEND, *_DEPENDS[name])
        chosen = {"format": 5, **{key: getattr(self.settings, key) for key in known}}
        digest = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:8]
        path = self.folder / f"{name}-{self.regime}-{self.frozen.step:06d}-{digest}.npz"
        if not path.exists():
            made, temporary = make(), path.with_suffix(".tmp.npz")
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(temporary, **vars(made))
            temporary.replace(path)
        with np.load(path) as saved:
            return dict(saved)

    def _drawn(self, name: str, asked: _Asked) -> Drawn:
        of_step = jax.random.fold_in(jax.random.key(self.seed), 1000 + self.frozen.step)
        key = jax.random.fold_in(of_step, 2 * (name == "oracle") + (self.regime == "common"))
        # `_portions` is a generator, so nothing is sampled yet.
        portions = self._portions(name, asked, key, unit=_DRAWN_AT_ONCE)
        return Drawn(**self._kept(name, lambda: Drawn.joined([drawn for drawn, _ in portions])))

    def _portions(
        self, name: str, asked: _Asked, key: jax.Array, *, unit: int
    ) -> Iterator[tuple[Drawn, Rollout]]:
        """Calls `draw` for portions of the rows, which contain a multiple of `unit` rows.

        The random key of a portion depends on the number of units before it.
        """
        rows, flat = np.repeat(asked.chosen, asked.budgets.shape[1]), asked.budgets.reshape(-1)
        size = max(_DRAWN_AT_ONCE // unit, 1) * unit
        title = f"{name}, step {self.frozen.step}, {self.regime} budgets"
        with self.progress.phase(title, len(rows)) as phase:
            for start in range(0, len(rows), size):
                part, one = slice(start, start + size), jax.random.fold_in(key, start // unit)
                given = asked.questions, rows[part], flat[part], one
                found = draw(self.frozen, *given, answers=asked.answers)
                yield found
                right = float(found[0].by_answer.mean())
                phase.update(min(start + size, len(rows)), right=right)

    def _make_pool(self) -> Pool:
        settings, frozen, traces = self.settings, self.frozen, self.settings.traces
        budgets, chosen = self._budgets(settings.questions, traces, self.seed), self._chosen
        number, each = 19 + 2 * frozen.step + (self.regime == "common"), budgets.shape[1]
        key = jax.random.fold_in(jax.random.key(self.seed), number)
        asked = _Asked(frozen.pool_questions, chosen, budgets, settings.answers)
        sketch = sketches.count_sketch(self.seed, frozen.params, settings.sketch)
        parts, grams, answer_grams = list[Drawn](), list[np.ndarray](), list[np.ndarray]()
        for drawn, rollout in self._portions("pool", asked, key, unit=each):
            scored = max(settings.answer_questions * each - len(grams) * traces, 0)
            found, of_answers = _score_rows(frozen, drawn, rollout, scored, sketch)
            grams += map(_products, found.reshape(-1, traces, *found.shape[1:]))
            both = np.concatenate([found[:scored], of_answers], 1)
            answer_grams += map(_products, both.reshape(-1, traces, *both.shape[1:]))
            parts.append(drawn)
        vectors = (traces, 3 * frozen.config.cuts.count)
        return Pool(
            **vars(Drawn.joined(parts)),
            cell_questions=np.repeat(chosen, each // traces),
            gram=np.stack(grams),
            with_answers=np.arange(len(answer_grams)),
            answer_gram=np.array(answer_grams, np.float32).reshape(-1, *vectors, *vectors),
        )
