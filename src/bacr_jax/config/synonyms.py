"""Maps setting names of other trainers and options of other commands to the names used here.

`yaml.nearest_key` looks up unknown keys here. `bacr train` calls `check_options` before argparse
parses the command line. Synonyms are only suggested in error messages and never accepted as keys.
"""

from collections.abc import Collection, Sequence

from bacr_jax.errors import UserError

# With budget.prior=choices, a larger budget.max does not change the trained budgets, which are
# listed in eval.budgets.
_BUDGETS = "eval.budgets for the budgets, and budget.max for the largest one"
_LENGTHS = (
    "eval.budgets and budget.max for thinking, and rollout.answer_tokens for the answer, such as "
    "eval.budgets=[256,1024] budget.max=1024 rollout.answer_tokens=64"
)
_REWARD = (
    "grader=FILE.py:function to grade correctness, or reward.weights={correct: 1, "
    "FILE.py:function: 0.2} to add a reward"
)
# Maps names that TRL, verl and similar trainers use to the key or keys to write. Most names contain
# only the part after the last dot, so that `n` also matches `actor_rollout_ref.rollout.n`. The
# names of sections are listed with the key that is most likely meant.
SYNONYMS = {
    "actor_learning_rate": "optimizer.learning_rate",
    "adam_beta1": "optimizer.b1",
    "adam_beta2": "optimizer.b2",
    "batch_size": "rollout.questions, the questions of a step (traces: times rollout.group_size)",
    "beta": "loss.kl_coef",
    "bf16": "model.compute_dtype=bfloat16",
    "budget": _BUDGETS,
    "budgets": _BUDGETS,
    "clip_eps": "loss.clip_low and loss.clip_high",
    "clip_range": "loss.clip_low and loss.clip_high",
    "clip_ratio": "loss.clip_low and loss.clip_high",
    "data": "data.train",
    "data.path": "data.train",
    "eval.data": "data.eval",
    "eval.dataset": "data.eval",
    "data_path": "data.train",
    "dataset": "data.train",
    "dataset_name": "data.train",
    "dataset_path": "data.train",
    "datasets": "data.train",
    "dtype": "model.compute_dtype",
    "entropy_coeff": "loss.entropy_coef",
    "epsilon": "loss.clip_low and loss.clip_high",
    "epsilon_high": "loss.clip_high",
    "eval_data": "data.eval",
    "eval_dataset": "data.eval",
    "eval_every": "eval.every",
    "eval_file": "data.eval",
    "eval_files": "data.eval",
    "eval_freq": "eval.every",
    "eval_steps": "eval.every",
    "experiment_name": "output.dir",
    "generate_max_len": _LENGTHS,
    "gradient_accumulation_steps": "train.micro_batch_rows, the rows of one accumulation step",
    "gradient_checkpointing": "model.remat",
    "init_kl_coef": "loss.kl_coef",
    "kl_beta": "loss.kl_coef",
    "kl_loss_coef": "loss.kl_coef",
    "logging_steps": "output.log_every",
    "lora_alpha": "adapter.alpha",
    "lora_r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "lora_target_modules": "adapter.targets",
    "lr": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.schedule",
    "lr_warmup_steps": "optimizer.warmup_steps",
    "mask_truncated_completions": "loss.overlong_filter",
    "max_completion_length": _LENGTHS,
    "max_grad_norm": "optimizer.grad_clip",
    "max_length": _LENGTHS,
    "max_new_tokens": _LENGTHS,
    "max_prompt_length": "data.max_prompt_tokens",
    "max_response_length": _LENGTHS,
    "max_seq_length": _LENGTHS,
    "max_steps": "train.steps",
    "max_thinking_tokens": _LENGTHS,
    "max_tokens": _LENGTHS,
    "micro_train_batch_size": "train.micro_batch_rows, the rows of one accumulation step",
    "model": "model.path",
    "model.name": "model.path",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "model_path": "model.path",
    "n": "rollout.group_size",
    "n_samples_per_prompt": "rollout.group_size",
    "num_epochs": "train.epochs",
    "num_generations": "rollout.group_size",
    "num_rollouts": "rollout.group_size",
    "num_steps": "train.steps",
    "num_train_epochs": "train.epochs",
    "num_warmup_steps": "optimizer.warmup_steps",
    "output_dir": "output.dir",
    "per_device_train_batch_size": "rollout.questions, the questions of a step on all devices",
    "ppo_mini_batch_size": "train.minibatches, the number of updates of a step",
    "pretrain": "model.path",
    "prompt_data": "data.train",
    "prompt_max_len": "data.max_prompt_tokens",
    "remote_rm_url": _REWARD,
    "report_to": "output.wandb or output.tensorboard",
    "reward": _REWARD,
    "reward_fn": _REWARD,
    "reward_fn_path": _REWARD,
    "reward_func": _REWARD,
    "reward_funcs": _REWARD,
    "reward_function": _REWARD,
    "reward_functions": _REWARD,
    "reward_weights": "reward.weights",
    "rollout_batch_size": "rollout.questions, the questions of a step (traces: times "
    "rollout.group_size)",
    "rollout_n": "rollout.group_size",
    "run_name": "output.dir",
    "save_every": "checkpoint.every",
    "save_freq": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "target_modules": "adapter.targets",
    "test_dataset": "data.eval",
    "test_file": "data.eval",
    "test_files": "data.eval",
    "test_freq": "eval.every",
    "thinking_budget": _BUDGETS,
    "token_budget": _BUDGETS,
    "tokenizer_name": "model.tokenizer",
    "torch_dtype": "model.compute_dtype",
    "total_epochs": "train.epochs",
    "total_steps": "train.steps",
    "total_training_steps": "train.steps",
    "train_batch_size": "rollout.questions, the questions of a step (traces: times "
    "rollout.group_size)",
    "train_data": "data.train",
    "train_dataset": "data.train",
    "train_file": "data.train",
    "train_files": "data.train",
    "use_peft": "adapter.rank",
    "use_vllm": "rollout.engine=vllm",
    "val_dataset": "data.eval",
    "val_file": "data.eval",
    "val_files": "data.eval",
    "verifier": _REWARD,
}
# Maps the names that keys of this library had before its first release to their current names.
RENAMED = {
    "advantage.score_uniform": "advantage.same_shift_for_batch",
    "conditioning.told": "conditioning.budget_input",
    "conditioning.words": "conditioning.prompt_text",
    "eval.dense": "eval.cut_every",
    "length.kept": "length.keep_fraction",
    "reward.apart": "reward.normalize_each",
    "rollout.ahead": "rollout.async_steps",
}
SYNONYMS |= RENAMED
# Sections of other trainers whose keys all have the same replacement, whatever their last part is.
_SECTIONS = {"custom_reward_function": _REWARD, "reward_model": _REWARD}
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
    return whole_synonym(key) or SYNONYMS.get(key.rpartition(".")[2].replace("-", "_"))


def whole_synonym(key: str) -> str | None:
    """Returns what to write instead of a name whose last part alone would be misleading, or None.

    An example is `custom_reward_function.path`, which has nothing in common with `model.path`.

    Args:
      key: the unknown dotted key. Dashes count as underscores.
    """
    parts = key.replace("-", "_").split(".")
    for section in parts[:-1]:
        if section in _SECTIONS:
            return _SECTIONS[section]
    return SYNONYMS.get(".".join(parts[-2:])) if len(parts) > 1 else None


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
