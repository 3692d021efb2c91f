"""Creates small runs of a method, and batches as input of a method's functions."""

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from bacr_jax.config import io as config_io
from bacr_jax.config.settings import resolve
from bacr_jax.methods import GroupBatch, load_method
from bacr_jax.methods.registry import problems
from bacr_jax.prompts.formats import format_for
from bacr_jax.runs.initial import initial_params, random_head
from bacr_jax.runs.setup import make_policy
from bacr_jax.training.run import init_state, make_run
from small_config import small_config

PRESETS = Path(__file__).parents[2] / "configs" / "methods"
NAMES = sorted(path.stem for path in PRESETS.glob("*.yaml"))

CHANGES = """
data: {ledger: {train_size: 64}}
budget: {max: 12}
curriculum: {update_every: 2}
rollout: {group_size: 4, chunk: 12}
value: {inner_steps: 2}
optimizer: {learning_rate: 1.0e-3}
train: {steps: 4}
selfbudgeter: {cold_start_steps: 2, cold_start_tokens: 256}
eval: {budgets: [12]}
"""


def load(folder, preset=None, *overrides):
    """Returns the config of a small run with a method's preset.

    Args:
      folder: parent of the run folder.
      preset: name of a file in configs/methods. None for the default method.
      overrides: overrides such as `train.steps=2`.
    """
    presets = [] if preset is None else [PRESETS / f"{preset}.yaml"]
    # The eight exits of this method need budgets of at least eight tokens.
    own = ["budget.min=8"] if preset == "s_grpo" else []
    overrides = [f"output.dir={folder / 'run'}", *own, *overrides]
    config = small_config(folder, CHANGES, *overrides, over=presets)
    config_io.check(config, also=problems)
    return config


class Odd:
    """Grader that ignores the reference answer.

    An answer is correct if the sum of its character codes is odd, which holds for about half of the
    texts that a random policy generates.
    """

    def grade(self, answers, references, *, mode, poll=None, questions=None):
        return [SimpleNamespace(correct=sum(map(ord, text)) % 2 == 1) for text in answers]

    def counters(self):
        return {}


def run_of(config, tokenizer_and_size, grader=None):
    """Returns a `Run` with a random policy, and the state at its start.

    Args:
      tokenizer_and_size: the tokenizer and the size of its vocabulary.
      grader: grader of the task. None for the task's default grader.
    """
    import dataclasses

    from bacr_jax.prompts.task_data import build_task_data

    method = load_method(resolve(config).method)
    style = format_for(config.data, declares_budget=method.declares_budget)
    task_data = build_task_data(resolve(config).task, *tokenizer_and_size, style=style)
    if grader is not None:
        task_data = dataclasses.replace(task_data, graders={task_data.graded_by: grader})
    policy = make_policy(resolve(config).policy, method, tokenizer_and_size[1])
    run = make_run(config, task_data, method, policy, config.train.steps)
    params = initial_params(jax.random.key(2), policy, None)
    return run, init_state(run, params, random_head(jax.random.key(3), policy))


def group_batch(
    config,
    *,
    outcomes=None,
    seed=0,
    questions=None,
    answers=1,
    extra=None,
    fraction=0.5,
    by_reward=None,
):
    """Returns a random `GroupBatch`, some of whose fields can be specified.

    Args:
      config: config of the run, which determines the method and the sizes.
      outcomes: outcome at each cut, which all answers at the cut share. None for random outcomes.
      questions: index of each question. None for 0, 1, 2 ...
    """
    rng = np.random.default_rng(seed)
    q, g = config.rollout.questions, config.rollout.group_size
    method = load_method(resolve(config).method)
    budgets = jnp.asarray(rng.integers(config.budget.min, config.budget.max + 1, (q, g)), jnp.int32)
    cuts = method.cuts(jax.random.key(seed), budgets)
    by_answer = rng.integers(0, 2, (*cuts.shape, method.answers)).astype(np.float32)
    if outcomes is not None:
        by_answer = np.broadcast_to(np.asarray(outcomes, np.float32)[..., None], by_answer.shape)
    thinking = np.minimum(rng.integers(1, config.budget.max + 1, (q, g)), np.asarray(budgets))
    fields = {
        "questions": np.arange(q) if questions is None else questions,
        "budgets": budgets,
        "cuts": cuts,
        "outcomes": by_answer.mean(-1),
        "by_answer": by_answer,
        "thinking": thinking,
        "lengths": thinking + 2,
        "closed": thinking < np.asarray(budgets),
        "closed_by_tag": thinking < np.asarray(budgets),
        "score_norm_proxy": rng.random(cuts.shape).astype(np.float32),
        "fraction": np.float32(fraction),
        "extra": extra or {},
        "by_reward": by_reward or {},
        "answer_lengths": np.full(cuts.shape, 2),
        "sampled": thinking + (thinking < np.asarray(budgets)),
    }
    return GroupBatch(**jax.tree.map(jnp.asarray, fields))


def credit_of(config, **given):
    """Runs a method's functions on a `group_batch`, jitted as in the training loop.

    Args:
      given: further arguments of `group_batch`.

    Returns:
      (method, batch, state, rewards, advantages, state after the batch).
    """
    method = load_method(resolve(config).method)
    shape = (config.rollout.questions, config.rollout.group_size)
    extra = {"declared": jnp.full(shape, 8), "declaration": jnp.full(shape, 2)}
    batch = group_batch(config, extra=extra, **given)
    state = method.init_state(64)
    values = None
    if method.uses_value:
        values = jnp.asarray(np.random.default_rng(1).random(batch.outcomes.shape), jnp.float32)

    @jax.jit
    def run(state, batch, values):
        rewards = method.rewards(state, batch)
        credit = method.advantages(state, batch, rewards, values)
        return rewards, credit, method.update(state, batch, rewards, values)

    return method, batch, state, *run(state, batch, values)
