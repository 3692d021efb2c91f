"""Answers within budgets from an engine in this process."""

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
    """Thinks within budgets and answers: one batch of thinking, then one of answers.

    Args:
      llm: an engine of a folder of `bacr export`.
      prompts: of each row its ids, its text, or messages for the folder's chat template.
      budgets: thinking tokens for all rows (a number, None, "none" or the name of a level), or one
        of these per row. A row that is told none thinks up to `thinking.cap` tokens.
      temperature: 0: the most likely tokens.
      top_p: nucleus.
      seed: of sampled tokens; each row has its own.

    Raises:
      ValueError: a budget can't be used, or the folder is not one of ours.
    """
    config = llm.llm_engine.vllm_config.model_config
    thinking = getattr(config.hf_config, "thinking", None)
    if not isinstance(thinking, Mapping):
        raise ValueError(
            f"{config.model}: does not say how thinking is held; serve a folder of bacr export"
        )
    rules, levels = read_rules(thinking), getattr(config.hf_config, "budget_levels", None) or {}
    told = [read_budget(budget, levels) for budget in _per_row(budgets, len(prompts))]
    tokenizer = llm.get_tokenizer()
    ids = [_ids(tokenizer, prompt, budget) for prompt, budget in zip(prompts, told)]
    for budget, row in zip(told, ids):
        check_length(rules, budget, len(row), config.max_model_len)
    drawn = [Sampling(temperature, top_p, seed * 65_537 + row) for row in range(len(ids))]
    xargs = [extras(budget, len(row)) for budget, row in zip(told, ids)]
    thoughts = [Thinking(rules, row, rules.limit(budget)) for budget, row in zip(told, ids)]
    _finish(llm, thoughts, drawn, xargs, 0)
    answers = [thought.answering() for thought in thoughts]
    _finish(llm, answers, drawn, xargs, 1)
    rows = [response_of(thought, answer) for thought, answer in zip(thoughts, answers)]
    decode = lambda row: tokenizer.decode(row.tokens, skip_special_tokens=False)
    return [dataclasses.replace(row, text=decode(row)) for row in rows]


def _per_row(budgets: Any, rows: int) -> list[Any]:
    if hasattr(budgets, "tolist"):
        budgets = budgets.tolist()
    if not isinstance(budgets, list | tuple):
        return [budgets] * rows
    if len(budgets) != rows:
        raise ValueError(
            f"budget: found {len(budgets)} for {rows} prompts; use one number, or one per prompt"
        )
    return list(budgets)


def _ids(tokenizer: Any, prompt: Any, budget: int | None) -> list[int]:
    """A prompt as ids."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    if all(isinstance(item, int) for item in prompt):
        return list(prompt)
    text = tokenizer.apply_chat_template(list(prompt), tokenize=False, budget=budget)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _finish(
    llm: LLM,
    parts: Sequence[Thinking | Answering],
    drawn: Sequence[Sampling],
    xargs: Sequence[dict[str, int | str]],
    number: int,
) -> None:
    """Asks the engine for all rows together until none of them has a call left."""
    while calls := {row: call for row, part in enumerate(parts) if (call := part.call())}:
        params = [_params(call, drawn[row], xargs[row], number) for row, call in calls.items()]
        prompts = [{"prompt_token_ids": list(call.prompt)} for call in calls.values()]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for row, output in zip(calls, outputs, strict=True):
            parts[row].take(list(output.outputs[0].token_ids))


def _params(
    call: Call, sampling: Sampling, xargs: dict[str, int | str], number: int
) -> SamplingParams:
    return SamplingParams(**parameters(call, sampling, number), extra_args=dict(xargs))
