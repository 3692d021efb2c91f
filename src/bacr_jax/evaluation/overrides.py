"""Checks which config keys are overridden when a saved policy answers questions.

`bacr evaluate`, `bacr generate`, `bacr serve` and `bacr_jax.load` use this module. All other keys
define the policy, which must answer with the settings of its training, or have no effect. This
module does not check the values of the keys.
"""

import difflib
from collections.abc import Iterator, Sequence

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.settings import resolve

# The tuples contain config keys and prefixes of config keys.
#
# Keys of the decoder of this package, which a vLLM server does not read.
_DECODER_KEYS = (
    "model.attention",
    "model.compute_dtype",
    "model.product_dtype",
    "rollout.attention",
)
# Key of the decoder that only `bacr evaluate` reads, because other commands use a single device.
_MESH_KEY = "mesh.decode_tensor"
# Keys of the decoder that `bacr serve` does not read either.
_SCHEDULE_KEYS = ("rollout.chunk", "rollout.refill", "rollout.windows")
# Keys that every command reads.
_COMMON_KEYS = (
    "budget.cap",
    "budget.levels",
    "eval.budget_tag",
    "model.path",
    "model.tokenizer",
    "output.compile_cache",
    "rollout.answer_tokens",
)
# Keys that determine the prompt of a question.
_PROMPT_KEYS = (
    "data.closing_text",
    "data.max_prompt_tokens",
    "data.prompt_date",
    "data.prompt_format",
    "data.system_prompt",
    "data.template_variables",
    "data.train",
)
EVALUATED_KEYS = (
    *(*_COMMON_KEYS, *_DECODER_KEYS, *_SCHEDULE_KEYS),
    *(_MESH_KEY, "budget.grace", "data.", "grader", "grading."),
)
SERVED_KEYS = (*_COMMON_KEYS, *_DECODER_KEYS, *_PROMPT_KEYS)
ASKED_KEYS = (*SERVED_KEYS, *_SCHEDULE_KEYS, "budget.grace", "eval.slots", "rollout.slots")
# Keys that define how a policy receives its budget. They can be overridden for a Hugging Face
# folder, because the folder may not specify them.
BUDGET_INPUT_KEYS = ("conditioning.budget_input", "conditioning.prompt_text")
# Reason for which an evaluation, or another command, refuses all other keys.
DEFINES_POLICY = "defines the policy and can't be overridden in an evaluation"
NOT_ASKED = "defines the policy, or does not affect its answers here, and can't be overridden"


def override_faults(
    overrides: Sequence[str], keys: tuple[str, ...], *, is_run: bool, reason: str = NOT_ASKED
) -> Iterator[str]:
    """Yields an error message for each override of a key that is not in `keys`.

    Unknown keys are reported later, when the overrides are applied.

    Args:
      overrides: overrides of the form `key.sub=value`.
      keys: keys, and prefixes of keys, that can be overridden.
      is_run: True for the policy of a run. False for a Hugging Face folder, for which
        `BUDGET_INPUT_KEYS` can be overridden too.
      reason: reason for which other keys are refused, for error messages.
    """
    for text in overrides:
        if not is_run and _declares_budget(text):
            continue
        for key in config_io.overridden_keys(text):
            if key.startswith(keys) or key not in config_io.schema():
                continue
            if not is_run and key in BUDGET_INPUT_KEYS:
                continue
            near = difflib.get_close_matches(key, keys, n=1, cutoff=0.0)
            yield f"{key} {reason}; override only keys such as {near[0]}"


def server_faults(overrides: Sequence[str], option: str) -> Iterator[str]:
    """Yields an error message for each override of a key that a vLLM server does not read.

    Args:
      overrides: overrides of the form `key.sub=value`.
      option: command-line option that selects the server.
    """
    for text in overrides:
        for key in config_io.overridden_keys(text):
            if key in (*_DECODER_KEYS, *_SCHEDULE_KEYS, _MESH_KEY):
                yield (
                    f"{key} has no effect with {option}, because the server computes the answers; "
                    "leave the key out, and set the server's own options instead"
                )


def _declares_budget(override: str) -> bool:
    """True if the override is a method whose policy writes a budget before each response."""
    from bacr_jax.methods.registry import declares_budget

    return config_io.overridden_keys(override) == ["method"] and declares_budget(
        resolve(config_io.override(Config(), [override])).method
    )
