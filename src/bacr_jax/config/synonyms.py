"""Maps setting names of other trainers and options of other commands to the names used here.

`yaml.nearest_key` looks up unknown keys here. `bacr train` calls `check_options` before argparse
parses the command line. Synonyms are only suggested in error messages and never accepted as keys.
"""

from collections.abc import Collection, Sequence

from bacr_jax.errors import UserError

# Maps names that TRL, verl and similar trainers use to the key or keys to write. Names contain only
# the part after the last dot, so that `n` also matches `actor_rollout_ref.rollout.n`.
SYNONYMS = {
    "adam_beta1": "optimizer.b1",
    "adam_beta2": "optimizer.b2",
    "batch_size": "rollout.questions, the questions of a step (traces: times rollout.group_size)",
    "beta": "loss.kl_coef",
    "bf16": "model.compute_dtype=bfloat16",
    "clip_ratio": "loss.clip_low and loss.clip_high",
    "dataset": "data.train",
    "dataset_name": "data.train",
    "entropy_coeff": "loss.entropy_coef",
    "epsilon": "loss.clip_low and loss.clip_high",
    "epsilon_high": "loss.clip_high",
    "eval_dataset": "data.eval",
    "eval_steps": "eval.every",
    "gradient_accumulation_steps": "train.micro_batch_rows, the rows of one accumulation step",
    "gradient_checkpointing": "model.remat",
    "kl_beta": "loss.kl_coef",
    "kl_loss_coef": "loss.kl_coef",
    "logging_steps": "output.log_every",
    "lora_alpha": "adapter.alpha",
    "lora_r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "lr": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.schedule",
    "max_completion_length": "budget.max for thinking and rollout.answer_tokens for the answer",
    "max_grad_norm": "optimizer.grad_clip",
    "max_new_tokens": "budget.max for thinking and rollout.answer_tokens for the answer",
    "max_prompt_length": "data.max_prompt_tokens",
    "max_response_length": "budget.max for thinking and rollout.answer_tokens for the answer",
    "max_steps": "train.steps",
    "max_tokens": "budget.max for thinking and rollout.answer_tokens for the answer",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "n": "rollout.group_size",
    "num_epochs": "train.epochs",
    "num_generations": "rollout.group_size",
    "num_steps": "train.steps",
    "num_train_epochs": "train.epochs",
    "output_dir": "output.dir",
    "per_device_train_batch_size": "rollout.questions, the questions of a step on all devices",
    "ppo_mini_batch_size": "train.minibatches, the number of updates of a step",
    "report_to": "output.wandb or output.tensorboard",
    "save_freq": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "test_freq": "eval.every",
    "total_epochs": "train.epochs",
    "total_training_steps": "train.steps",
    "train_batch_size": "rollout.questions, the questions of a step (traces: times "
    "rollout.group_size)",
    "train_files": "data.train",
    "use_vllm": "rollout.engine=vllm",
    "val_files": "data.eval",
}
# Maps options of other libraries' commands to the options of this library.
_OPTIONS = {
    "c": "--config",
    "dry-run": "--check",
    "config-name": "--config",
    "config-file": "--config",
    "resume-from-checkpoint": "--resume",
    "n-gpus": "mesh.data or mesh.fsdp",
}


def synonym(key: str) -> str | None:
    """Returns what to write instead of a name that another trainer uses, or None if it is unknown.

    Args:
      key: the unknown dotted key. Dashes count as underscores.
    """
    return SYNONYMS.get(key.rpartition(".")[2].replace("-", "_"))


def check_options(words: Sequence[str], settings: Collection[str]) -> None:
    """Rejects config keys that are written as options, and options of other trainers' commands.

    Args:
      words: the arguments of the command.
      settings: dotted names of all keys.

    Raises:
      UserError: if the command line contains such options. The error contains one line for each.
    """
    lines = []
    for index, word in enumerate(words):
        if word == "--":
            break
        following = words[index + 1] if index + 1 < len(words) else ""
        advice = _instead_of(word, following, settings)
        if advice is not None:
            lines.append(advice)
    if lines:
        raise UserError(*lines)


def _instead_of(word: str, following: str, settings: Collection[str]) -> str | None:
    """Returns the error message for an option, or None if argparse accepts or rejects it itself.

    Args:
      word: the option.
      following: the next word of the command line, or "".
      settings: dotted names of all keys.
    """
    if not word.startswith("-"):
        return None
    name, equals, value = word.lstrip("-").partition("=")
    if not equals and following and not following.startswith("-") and "=" not in following:
        value = following
    option = _OPTIONS.get(name.replace("_", "-"))
    if option is not None:
        needs_value = option.startswith("--config")
        instead = f"{option} {value or 'FILE'}" if needs_value else option
        return f"command line: {word}: there is no such option; use {instead}"
    key = name.replace("-", "_")
    if key in settings:
        return f"command line: {word}: config keys have no dashes; use {_set(key, value)}"
    other = synonym(key)
    if other is not None:
        instead = _set(other, value) if other in settings else other
        return (
            f"command line: {word}: there is no such option, and config keys have no dashes; use "
            f"{instead}"
        )
    return None


def _set(key: str, value: str) -> str:
    return f"{key}={value or '...'}"
