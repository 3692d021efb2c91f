"""Generates answers within budgets with a vLLM engine in this process."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vllm import LLM, SamplingParams

from bacr_client import Answering, Call, Response, Sampling, Thinking, read_budget, read_rules
from bacr_client.calls import response_of
from bacr_client.server import check_length, extras, parameters


def generate_within(
    llm: LLM,
    prompts: Sequence[Any],
    budgets: Any = None,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> list[Response]:
    """Generates one answer per prompt, within a budget of thinking tokens.

    The engine first generates the thinking of all prompts as one batch, then all answers.

    Args:
      llm: engine of a folder that `bacr export` wrote.
      prompts: each prompt as token ids, as text, or as messages for the folder's chat template.
      budgets: budget of all prompts, or a list with one budget per prompt. A budget is a number of
        thinking tokens, the name of a level, or None (or "none") for no budget. Without a budget,
        thinking has at most `thinking.cap` tokens.
      temperature: sampling temperature. 0 takes the most likely tokens.
      top_p: sample from the most likely tokens with this total probability.
      seed: random seed. Each prompt gets a seed of its own, derived from it.

    Returns:
      One response per prompt.

    Raises:
      ValueError: a budget is invalid, or `bacr export` did not write the folder.
    """
    config = llm.llm_engine.vllm_config.model_config
    thinking = getattr(config.hf_config, "thinking", None)
    if not isinstance(thinking, Mapping):
        raise ValueError(
            f"{config.model}: the file config.json has no section 'thinking', which describes how "
            "budgets are enforced; use a folder that bacr export wrote"
        )
    rules = read_rules(thinking)
    levels = getattr(config.hf_config, "budget_levels", None) or {}
    limits = [read_budget(budget, levels) for budget in _per_prompt(budgets, len(prompts))]
    tokenizer = llm.get_tokenizer()
    ids = [_prompt_ids(tokenizer, prompt, limit) for prompt, limit in zip(prompts, limits)]
    for limit, prompt_ids in zip(limits, ids):
        check_length(rules, limit, len(prompt_ids), config.max_model_len)
    sampling = [Sampling(temperature, top_p, seed * 65_537 + row) for row in range(len(ids))]
    xargs = [extras(limit, len(prompt_ids)) for limit, prompt_ids in zip(limits, ids)]
    thoughts = [
        Thinking(rules, prompt_ids, rules.limit(limit)) for limit, prompt_ids in zip(limits, ids)
    ]
    _finish(llm, thoughts, sampling, xargs, 0)
    answers = [thought.answering() for thought in thoughts]
    _finish(llm, answers, sampling, xargs, 1)
    responses = []
    for thought, answer in zip(thoughts, answers):
        response = response_of(thought, answer)
        text = tokenizer.decode(response.tokens, skip_special_tokens=False)
        responses.append(dataclasses.replace(response, text=text))
    return responses


def _per_prompt(budgets: Any, count: int) -> list[Any]:
    """Returns a list with one budget for each of `count` prompts."""
    if hasattr(budgets, "tolist"):
        budgets = budgets.tolist()
    if not isinstance(budgets, list | tuple):
        return [budgets] * count
    if len(budgets) != count:
        raise ValueError(
            f"budget: found {len(budgets)} budgets for {count} prompts; pass one budget for all "
            "prompts, or one per prompt"
        )
    return list(budgets)


def _prompt_ids(tokenizer: Any, prompt: Any, budget: int | None) -> list[int]:
    """Returns the token ids of a prompt, which is given as ids, as text or as messages."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    if all(isinstance(item, int) for item in prompt):
        return list(prompt)
    text = tokenizer.apply_chat_template(list(prompt), tokenize=False, budget=budget)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _finish(
    llm: LLM,
    parts: Sequence[Thinking | Answering],
    sampling: Sequence[Sampling],
    xargs: Sequence[dict[str, int | str]],
    number: int,
) -> None:
    """Calls the engine for all prompts together, until each part is complete.

    Args:
      llm: the engine.
      parts: thinking or answer of each prompt. It is updated in place.
      sampling: sampling settings of each prompt.
      xargs: extra arguments of each prompt's requests.
      number: 0 for thinking and 1 for answers, from which seeds are derived.
    """
    while calls := {row: call for row, part in enumerate(parts) if (call := part.call())}:
        params = [_params(call, sampling[row], xargs[row], number) for row, call in calls.items()]
        prompts = [{"prompt_token_ids": list(call.prompt)} for call in calls.values()]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for row, output in zip(calls, outputs, strict=True):
            parts[row].take(list(output.outputs[0].token_ids))


def _params(
    call: Call, sampling: Sampling, xargs: dict[str, int | str], number: int
) -> SamplingParams:
    """Returns vLLM's sampling parameters for one call."""
    return SamplingParams(**parameters(call, sampling, number), extra_args=dict(xargs))
