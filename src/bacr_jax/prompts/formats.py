"""Prompt formats: all strings around a question, its thinking and its answer.

All methods, and all models with the same format, use exactly these strings. A full sequence is

    prompt (ends with think_open) | thinking | suffix | answer answer_close

The decoding loop appends the suffix. The suffix is `natural_suffix` if the model ended its thinking
by generating `think_close`. It is `forced_suffix` if the thinking was truncated at the budget or
the turn ended without `think_close`.

docs/prompts.md explains why instructions are placed in a system message, except in `native`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass

from bacr_jax.config import DataConfig
from bacr_jax.config.derived import builtin_vocab
from bacr_jax.config.values import FrozenMap, shown, written
from bacr_jax.errors import UserError

# The prompt that was used to measure Qwen2.5's published MATH and GSM8K results.
MATH_SYSTEM = r"Please reason step by step, and put your final answer within \boxed{}."

# Thinking tags of reasoning models. Each tag is a single token.
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


@dataclass(frozen=True)
class PromptFormat:
    """A prompt format. The module docstring describes the order of its strings.

    Attributes:
      name: key in `FORMATS`.
      chat: whether to wrap the question in the tokenizer's chat template.
      system: system message of the chat template, or an empty string for none.
      bare: whether to reject chat templates that add a default system message to the prompt.
      variables: variables of the chat template, keyed by name.
      date: date (YYYY-MM-DD) for chat templates that contain one. If empty, today's date is used.
      before: text before the question. With a chat template, it is part of the user message.
      after: text after the question. With a chat template, it is part of the user message.
      think_open: string at the end of the prompt that opens the thinking.
      think_close: string with which the model ends its thinking. If empty, thinking only ends with
        the end of the turn.
      answer_open: string that opens the answer. Both suffixes end with it, ignoring whitespace.
      answer_close: string that ends the answer.
      forced_suffix: appended to thinking that was truncated or not closed.
      natural_suffix: appended to thinking that was closed by the model.
      turn_end: tokens that end the turn, in addition to the tokenizer's EOS token.
      unused: tokens that are never sampled, in addition to markup that is not part of the format.
      budget_close: string that ends the budget at the beginning of a response, for formats in which
        responses declare their budget. Empty for all other formats.
      budget_words: text that contains the budget in the prompt, with `{budget}` as the placeholder
        for the number. If empty, the sentence in the config is used.
    """

    name: str
    chat: bool = False
    system: str = ""
    bare: bool = False
    variables: Mapping[str, bool | int | str | float] = FrozenMap()
    date: str = ""
    before: str = ""
    after: str = ""
    think_open: str = ""
    think_close: str = "</think>"
    answer_open: str = "<answer>"
    answer_close: str = "</answer>"
    forced_suffix: str = ""
    natural_suffix: str = ""
    turn_end: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    budget_close: str = ""
    budget_words: str = ""

    @property
    def is_native(self) -> bool:
        """True if the model was trained to think between its tags before any training here.

        The publishers of these models advise against greedy decoding, because it can repeat text
        endlessly.
        """
        return self.name == "native"


_QWEN_TURN_END = ("<|im_end|>", "<|endoftext|>")

# Base format of small character-level models, in which every tag is a single token.
_small = functools.partial(
    PromptFormat,
    before="<bos>",
    think_open="<think>",
    forced_suffix="</think><answer>",
    natural_suffix="<answer>",
)

FORMATS = {
    style.name: style
    for style in (
        # Format of the procedural ledger task.
        _small(name="ledger", unused=("-", "f", "g", "h"), budget_words="f{budget}"),
        # Ledger format for SelfBudgeter. The task does not use the letters f to h, so g and h serve
        # as the tags around the declared budget.
        _small(
            name="ledger_budget", think_open="<think>g", unused=("-", "f", "g"), budget_close="h"
        ),
        # Format for all other character-level tasks. A budget in the prompt follows ~, and a
        # declared budget is enclosed in braces.
        _small(name="characters", budget_words="~{budget}"),
        _small(name="characters_budget", think_open="<think>{", budget_close="}"),
        # SelfBudgeter (arXiv 2505.11274): the response begins with a declared budget. Its solution
        # corresponds to the thinking of other methods, and the answer has the same format.
        PromptFormat(
            name="budget_solution",
            chat=True,
            system=(
                "First estimate how many tokens your solution needs, between <budget> and "
                "</budget>. Then write the solution, step by step, between <solution> and "
                "</solution>, and after it only the final answer between <answer> and </answer>."
            ),
            think_open="<budget>",
            think_close="</solution>",
            forced_suffix="\n</solution>\n<answer>\n",
            natural_suffix="\n<answer>\n",
            turn_end=_QWEN_TURN_END,
            budget_close="</budget>\n<solution>\n",
        ),
        # The paper's format. The prompt ends with the opening tag, so that even an untrained model
        # starts thinking immediately.
        PromptFormat(
            name="think_answer",
            chat=True,
            system=(
                "Reason step by step between <think> and </think>, and write after it only the "
                "final answer between <answer> and </answer>."
            ),
            think_open="<think>\n",
            forced_suffix="\n</think>\n<answer>\n",
            natural_suffix="\n<answer>\n",
            turn_end=_QWEN_TURN_END,
        ),
        # For instruct models without further training. They do not generate tags, so the thinking
        # is the entire solution and ends with the turn. If the solution is truncated at the budget,
        # the suffix opens a box. The answer ends with a blank line, because boxes can contain
        # braces.
        PromptFormat(
            name="boxed",
            chat=True,
            system=MATH_SYSTEM,
            think_close="",
            answer_open=r"\boxed{",
            answer_close="\n\n",
            forced_suffix="\n\n**Final Answer**\n\\boxed{",
            natural_suffix="\n\n**Final Answer**\n\\boxed{",
            turn_end=_QWEN_TURN_END,
        ),
        # This format is for reasoning models, which were trained with their own thinking tags. The
        # prompt is taken from their model cards. The text that is inserted after truncated thinking
        # is the one that AnytimeReasoner (arXiv 2505.13438) uses for R1-Distill.
        PromptFormat(
            name="native",
            chat=True,
            after=f"\n{MATH_SYSTEM}",
            think_open=f"{THINK_OPEN}\n",
            answer_open=r"\boxed{",
            answer_close="\n\n",
            forced_suffix=f"...\n\n...\n\n{THINK_CLOSE}\n\n**Final Answer**\n\\boxed{{",
            natural_suffix="\n\n**Final Answer**\n\\boxed{",
            turn_end=_QWEN_TURN_END,
        ),
    )
}


def format_for(data: DataConfig, *, declares_budget: bool = False) -> PromptFormat:
    """Returns the prompt format of a run.

    Tasks with a built-in vocabulary (see `builtin_vocab`) use the format with the name of the
    vocabulary. All other tasks use data.prompt_format, where "auto" means think_answer.

    Args:
      declares_budget: True for methods whose responses begin with a budget. They use separate
        formats.

    Raises:
      UserError: If a text in the config is incompatible with the format.
    """
    tokens = builtin_vocab(data)
    if declares_budget:
        name = f"{tokens}_budget" if tokens else "budget_solution"
    elif tokens or data.prompt_format == "auto":
        name = tokens or "think_answer"
    else:
        name = data.prompt_format
    return with_texts(FORMATS[name], data)


def with_texts(style: PromptFormat, data: DataConfig) -> PromptFormat:
    """Applies the closing text, system message, template variables and date of a run.

    Raises:
      UserError: If one of them is incompatible with the format.
    """
    style = with_closing_text(style, data.closing_text)
    system = data.system_prompt
    variables = data.template_variables
    date = data.prompt_date
    chat_settings = []
    if system is not None:
        chat_settings.append(f"data.system_prompt={shown(system)}")
    if variables:
        chat_settings.append(f"data.template_variables={written(variables)}")
    if date is not None:
        chat_settings.append(f"data.prompt_date={date}")
    if chat_settings and not style.chat:
        raise UserError(
            f"{chat_settings[0]} has no effect, because the prompt format {style.name!r} does not "
            "use a chat template; leave the key out"
        )
    if system is not None:
        is_blank = not system.strip()
        style = dataclasses.replace(style, system="" if is_blank else system, bare=is_blank)
    if date is not None:
        style = dataclasses.replace(style, date=date)
    if variables:
        style = dataclasses.replace(style, variables=variables)
    return style


def with_closing_text(style: PromptFormat, text: str | None) -> PromptFormat:
    """Replaces the texts of a format that are inserted between thinking and answer.

    The forced suffix is inserted after truncated thinking, and the natural suffix after thinking
    that the policy has closed.

    Args:
      style: the prompt format.
      text: new forced suffix. The part after the tag that closes the thinking becomes the natural
        suffix, as in the predefined formats. None leaves the format unchanged.

    Raises:
      UserError: If the text does not close the thinking exactly once, or does not end by opening
        the answer.
    """
    if text is None:
        return style
    setting = f"data.closing_text={text!r}"
    example = f"set it to a text such as {style.forced_suffix!r}"
    if not style.chat:
        raise UserError(
            f"{setting} can't be used with a character-level task, whose tokens are fixed; set it "
            "to null"
        )
    if style.think_close and text.count(style.think_close) != 1:
        raise UserError(
            f"{setting} must contain {style.think_close!r}, which ends the thinking in the prompt "
            f"format {style.name!r}, exactly once; {example}"
        )
    after = text.partition(style.think_close)[2] if style.think_close else text
    if after.count(style.answer_open) != 1 or not after.rstrip().endswith(style.answer_open):
        raise UserError(
            f"{setting} must end with {style.answer_open!r}, which begins the answer in the "
            f"prompt format {style.name!r}; {example}"
        )
    return dataclasses.replace(style, forced_suffix=text, natural_suffix=after)
