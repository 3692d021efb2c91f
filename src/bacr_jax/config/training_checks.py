"""Validates the settings of rollouts, updates and evaluations.

`checks` calls this module.
"""

import itertools
import math
from collections.abc import Iterator

from bacr_client.server import is_address
from bacr_jax.config.derived import HOLDOUT, matching_sets
from bacr_jax.config.method_settings import BudgetConfig, DistillConfig, LossConfig, ValueConfig
from bacr_jax.config.schema import (
    DataConfig,
    EvalConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
)
from bacr_jax.config.values import shown, written

# Maximum number of truncation points (cuts) per trace in an evaluation with `eval.cut_every`. It is
# limited because an answer is sampled at every cut.
_MOST_CUTS = 256
# Smallest common clip range for the ratios of single tokens. GSPO has 3e-4 and 4e-4.
_TOKEN_CLIP = 0.1


def batch_problems(
    rollout: RolloutConfig, train: TrainConfig, budget: BudgetConfig
) -> Iterator[str]:
    """Yields an error message for each problem of the batch and micro-batch sizes."""
    if rollout.questions % train.minibatches:
        yield (
            f"train.minibatches={train.minibatches} does not divide "
            f"rollout.questions={rollout.questions}; set it to "
            f"{math.gcd(train.minibatches, rollout.questions)}, or change the number of questions"
        )
    elif train.micro_batch_rows is not None:
        rows = rollout.questions // train.minibatches * rollout.group_size
        if rows > train.micro_batch_rows and rows % train.micro_batch_rows:
            yield (
                f"train.micro_batch_rows={train.micro_batch_rows} does not divide the {rows} "
                "traces of an update (rollout.questions x rollout.group_size / "
                f"train.minibatches); set it to {math.gcd(rows, train.micro_batch_rows)}"
            )
    if train.micro_batch_rows is not None and train.micro_batch_tokens is not None:
        yield (
            f"train.micro_batch_tokens={train.micro_batch_tokens} and "
            f"train.micro_batch_rows={train.micro_batch_rows} both set the size of a micro-batch; "
            "set one of them to null"
        )
    # Assumes a prompt of one token, because the questions have not been read yet.
    shortest = 1 + budget.max + budget.grace + rollout.answer_tokens
    if train.micro_batch_tokens is not None and train.micro_batch_tokens < shortest:
        yield (
            f"train.micro_batch_tokens={train.micro_batch_tokens}: with budget.max={budget.max} "
            f"and rollout.answer_tokens={rollout.answer_tokens}, a single trace may have "
            f"{shortest} tokens or more; set a larger number, or null"
        )
    if train.padding_free and train.micro_batch_tokens is None:
        yield (
            "train.padding_free=true needs micro-batches that are limited by their number of "
            "tokens; set train.micro_batch_tokens=2048 and train.micro_batch_rows=null"
        )


def rollout_problems(rollout: RolloutConfig, loss: LossConfig, train: TrainConfig) -> Iterator[str]:
    """Yields an error message for each problem of the vLLM servers and of `rollout.async_steps`."""
    yield from _servers(rollout)
    yield from _ahead(rollout, loss, train)


def _servers(rollout: RolloutConfig) -> Iterator[str]:
    """Yields an error message if the vLLM servers conflict with `rollout.engine`."""
    if rollout.engine == "vllm" and not rollout.urls:
        yield (
            "rollout.engine=vllm needs the addresses of vLLM servers, but rollout.urls is empty; "
            "set rollout.urls=[http://HOST:PORT]"
        )
    wrong = [url for url in rollout.urls if not is_address(url)]
    if wrong:
        yield (
            f"rollout.urls: {shown(wrong[0])} is not the address of a server; use addresses such "
            "as http://HOST:PORT"
        )
    if rollout.engine == "jax" and rollout.urls:
        yield (
            f"rollout.urls={list(rollout.urls)} has no effect without rollout.engine=vllm; set "
            "rollout.engine=vllm, or rollout.urls=[]"
        )


def _ahead(rollout: RolloutConfig, loss: LossConfig, train: TrainConfig) -> Iterator[str]:
    """Yields an error message for each setting that conflicts with `rollout.async_steps=1`."""
    if not rollout.async_steps:
        return
    for name in ("undo_closed_answers", "undo_filled_budgets"):
        bound = getattr(train, name)
        if bound is not None:
            yield (
                f"train.{name}={written(bound)}: with rollout.async_steps=1, the next batch is "
                "already sampled when an update would be undone; set it to null, or set "
                "rollout.async_steps=0"
            )
    if rollout.engine == "jax":
        yield (
            "rollout.async_steps=1 samples during the update, but the built-in decoder and the "
            "learner share the same devices; set rollout.engine=vllm, or rollout.async_steps=0"
        )
    corrections = (loss.importance_cap, loss.sequence_cap, loss.sequence_mask)
    if all(value is None for value in corrections):
        yield (
            "rollout.async_steps=1: the traces are sampled by the previous policy, but no "
            "correction for this difference is set; set loss.importance_cap=2, or "
            "loss.sequence_mask=0.05"
        )


def undo_problems(train: TrainConfig, budget: BudgetConfig) -> Iterator[str]:
    """Yields an error message for each setting of budgets that `train.undo_filled_budgets` forbids.

    The guard compares the traces with the largest budget in two consecutive steps. Both steps must
    have enough traces with the same largest budget.
    """
    bound = train.undo_filled_budgets
    if bound is None:
        return
    place = f"train.undo_filled_budgets={written(bound)}"
    if budget.prior not in ("choices", "fixed"):
        yield (
            f"{place}: many traces of each step must have the same largest budget, which "
            f"budget.prior={budget.prior} does not ensure; set it to null, or set "
            "budget.prior=fixed or budget.prior=choices"
        )
    stages = budget.stages
    if any(later < earlier for earlier, later in itertools.pairwise(stages)):
        yield (
            f"{place}: budget.stages={written(stages)} lowers the largest budget during training, "
            "so that more traces fill it although the policy did not change; set it to null, or "
            "set budget.stages=[]"
        )


def loss_problems(
    loss: LossConfig, value: ValueConfig, optimizer: OptimizerConfig, distill: DistillConfig
) -> Iterator[str]:
    """Yields an error message for each conflict between settings of the loss."""
    if optimizer.single_rate and value.inner_steps:
        yield (
            f"value.inner_steps={value.inner_steps}: these steps train only the value head, but "
            "with optimizer.single_rate=true each step updates all parameters; set "
            "value.inner_steps=0"
        )
    ratio_is_bounded = loss.importance_cap is not None or loss.dual_clip is not None
    if loss.old_logprobs == "sampler" and not ratio_is_bounded:
        yield (
            "loss.old_logprobs=sampler: the log-probabilities of sampler and learner differ, and "
            "nothing bounds the ratio of a token with a negative advantage; set "
            "loss.importance_cap=2, or loss.old_logprobs=learner"
        )
    yield from _sequence_cap(loss)
    if distill.teacher is not None and distill.coef == 0.0:
        yield (
            f"distill.teacher={shown(distill.teacher, quote=False)} has no effect with "
            "distill.coef=0; set distill.coef=1, or distill.teacher=null"
        )
    if loss.ratio != "sequence":
        return
    if loss.aggregate != "seq_mean_token_mean":
        yield (
            f"loss.aggregate={loss.aggregate}: with loss.ratio=sequence, every token of a trace "
            "has the loss of the whole trace, so their sum would grow with the square of the "
            "length; set loss.aggregate=seq_mean_token_mean (each trace once, Eq. 15), or "
            "loss.ratio=token"
        )
    if loss.importance_cap is not None:
        yield (
            f"loss.importance_cap={written(loss.importance_cap)} limits a weight per token, but "
            "loss.ratio=sequence has one weight per trace; set loss.importance_cap=null, or "
            "loss.ratio=token"
        )


def loss_advice(loss: LossConfig) -> Iterator[str]:
    """Yields a recommendation if the clip range does not fit the ratio of the loss."""
    if loss.ratio == "gspo" and min(loss.clip_low, loss.clip_high) >= _TOKEN_CLIP:
        yield (
            f"loss.clip_low={written(loss.clip_low)} loss.clip_high={written(loss.clip_high)}: "
            "with loss.ratio=gspo the ratio is a mean over the tokens of a trace, which stays so "
            "close to 1 that this range never clips; set loss.clip_low=3e-4 and "
            "loss.clip_high=4e-4, the values of its publication (arXiv 2507.18071)"
        )


def _sequence_cap(loss: LossConfig) -> Iterator[str]:
    """Yields an error message for each setting that conflicts with `loss.sequence_cap`."""
    if loss.sequence_cap is None:
        return
    key = f"loss.sequence_cap={written(loss.sequence_cap)}"
    if loss.importance_cap is not None:
        yield (
            f"{key} and loss.importance_cap={written(loss.importance_cap)} would both weight a "
            "token by the ratio of learner and sampler; set one of them to null"
        )
    if loss.old_logprobs == "sampler":
        yield (
            f"{key}: with loss.old_logprobs=sampler the ratio of each token already contains the "
            "sampler's probability; set loss.old_logprobs=scored, or loss.sequence_cap=null"
        )


def evaluation_problems(evaluation: EvalConfig, data: DataConfig) -> Iterator[str]:
    """Yields an error message for each problem of the section `eval`."""
    yield from selection_problems(evaluation, data)
    yield from samples_problems(evaluation, data)
    yield from dense_problems(evaluation)


def selection_problems(evaluation: EvalConfig, data: DataConfig) -> Iterator[str]:
    """Yields an error message for each problem of `eval.select` and `eval.holdout`."""
    select = evaluation.select
    matches = matching_sets(select, data.eval)
    if select == HOLDOUT:
        if evaluation.every is not None and not evaluation.holdout:
            yield (
                f"eval.holdout=0 holds out no questions, but eval.select={HOLDOUT} selects the "
                "best checkpoint by them; set eval.holdout to 1 or more, or set eval.select to a "
                "set of data.eval"
            )
    elif len(matches) != 1:
        count = "none" if not matches else "several"
        yield (
            f"eval.select: {select!r} is the name of {count} of the sets in data.eval, but must "
            f"be the name of one; use {HOLDOUT}" + "".join(f" or {spec}" for spec in data.eval)
        )


def samples_problems(evaluation: EvalConfig, data: DataConfig) -> Iterator[str]:
    """Yields an error message for each set in `data.eval` without a number in `eval.samples`."""
    samples = evaluation.samples
    if isinstance(samples, int):
        return
    for spec in data.eval:
        name = spec.partition(":")[0]
        if spec not in samples and name not in samples:
            yield (
                f"eval.samples={written(samples)} contains no number for {spec}, a set of "
                f"data.eval; add {name}: 4, or use one number for all sets"
            )


def dense_problems(evaluation: EvalConfig, key: str = "eval.cut_every=") -> Iterator[str]:
    """Yields an error message if `eval.cut_every` gives no truncation points or too many.

    An evaluation with `eval.cut_every` truncates each trace at every multiple of this number of
    tokens (a cut) and samples an answer at each cut.

    Args:
      evaluation: section `eval` of the config.
      key: the key or option that set the value, with a trailing `=`. The message starts with it.
    """
    every = evaluation.cut_every
    largest = max(evaluation.budgets, default=0)
    if every is None:
        return
    if every >= largest:
        advice = "use a smaller number" if largest > 1 else "leave it out, or use a larger budget"
        yield f"{key}{every}: there is no multiple below the largest budget {largest}; {advice}"
        return
    # There is a cut at every multiple of `every` below the largest budget, and one at the budget.
    cuts = -(-largest // every)
    if cuts > _MOST_CUTS:
        yield (
            f"{key}{every} results in {cuts} truncation points below {largest} tokens; set it to "
            f"{-(-largest // _MOST_CUTS)} or more"
        )
