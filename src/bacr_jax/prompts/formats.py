r"""Every string that stands around a question, its thinking and its answer.

All methods, and all models of one format, see exactly these strings. A row of text is

    prompt (ends with think_open) | thinking | suffix | answer answer_close

and the suffix is forced by the decoding loop: `forced_suffix` where the budget cut the thinking (or
the turn ended without closing it), `natural_suffix` where the model wrote `think_close` itself.

docs/data.md says why what is asked for stands in a system message, and in `native` does not.
"""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass

from bacr_jax.config import Config
from bacr_jax.config.derived import own_tokens
from bacr_jax.config.values import FrozenMap, shown, written
from bacr_jax.errors import UserError

# The prompt Qwen2.5's published MATH and GSM8K numbers were measured with.
MATH_SYSTEM = r"Please reason step by step, and put your final answer within \boxed{}."

# The thinking tags of models that were trained to think, one token each.
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class PromptFormat:
    """How a question becomes a prompt and where its answer stands; see the module for the order.

    Attributes:
      chat: wrap the question in the tokenizer's own chat template.
      system: system message of the chat template; empty: there is none.
      bare: a chat template that writes a system message of its own is refused.
      variables: of the chat template, by name.
      date: YYYY-MM-DD, the date that a chat template may write; empty: today.
      before, after: text round the question (inside the user's message with a chat template).
      think_close: with this the model ends its thinking; empty: only by ending its turn.
      answer_open: opens the answer; the last thing in both suffixes, blanks aside.
      turn_end: tokens that end the turn, besides the tokenizer's own end token.
      unused: tokens that are never sampled, besides markup that is no part of the format.
      budget_close: ends the budget that the response declares first; empty: it declares none.
      budget_words: tells a budget, `{budget}` being its number; empty: the config's sentence does.
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


_QWEN_TURN_END = ("<|im_end|>", "<|endoftext|>")

# A small model of characters, in which every tag is one token.
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
        # The procedural task.
        _small(name="ledger", unused=("-", "f", "g", "h"), budget_words="f{budget}"),
        # SelfBudgeter's form of it: the ledger has no operations f to h, and g and h stand for the
        # tags round the declared budget.
        _small(
            name="ledger_budget", think_open="<think>g", unused=("-", "f", "g"), budget_close="h"
        ),
        # Other questions. A budget is told after ~, and declared between braces.
        _small(name="characters", budget_words="~{budget}"),
        _small(name="characters_budget", think_open="<think>{", budget_close="}"),
        # SelfBudgeter (arXiv 2505.11274): the response opens with the budget it wants. Its solution
        # is what is thinking elsewhere; the answer is asked for as of every other method.
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
        # The paper's form. The opening tag is given, so that an untrained model too thinks at once.
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
        # Untouched Instruct models: no tags, the thinking is the whole solution and ends with the
        # turn. A solution cut by its budget is asked for the box alone. A brace can not end the
        # answer, because boxes hold braces; a blank line does.
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
        # Models that were trained to think, in their own tags; asked as their model cards do, and
        # closed as AnytimeReasoner (arXiv 2505.13438) closes R1-Distill.
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


def format_for(config: Config, *, declares_budget: bool = False) -> PromptFormat:
    """The format of a run: data.prompt_format, or the ledger's own, or tags.

    Methods whose responses open with a budget have a form of their own; all others share one.
    UserError: a text of the config does not fit the format.
    """
    tokens = own_tokens(config.data)
    if declares_budget:
        name = f"{tokens}_budget" if tokens else "budget_solution"
    elif tokens or config.data.prompt_format == "auto":
        name = tokens or "think_answer"
    else:
        name = config.data.prompt_format
    return with_texts(FORMATS[name], config)


def with_texts(style: PromptFormat, config: Config) -> PromptFormat:
    """The format with the closing text, system message, template variables and date of a config.

    UserError: one of them does not fit the format.
    """
    system, variables = config.data.system_prompt, config.data.template_variables
    date = config.data.prompt_date
    style = with_closing_text(style, config.data.closing_text)
    found = [] if system is None else [f"data.system_prompt={shown(system)}"]
    found += [f"data.template_variables={written(variables)}"] if variables else []
    found += [] if date is None else [f"data.prompt_date={date}"]
    if found and not style.chat:
        raise UserError(
            f"{found[0]}: the prompt format {style.name!r} has no chat template; leave it out"
        )
    if system is not None:
        blank = not system.strip()
        style = dataclasses.replace(style, system="" if blank else system, bare=blank)
    if date is not None:
        style = dataclasses.replace(style, date=date)
    return dataclasses.replace(style, variables=variables) if variables else style


def with_closing_text(style: PromptFormat, text: str | None) -> PromptFormat:
    """The format with another forced suffix; None leaves it as it is.

    What follows the closing of the thinking in it is the natural suffix, as in the formats here.
    """
    if text is None:
        return style
    found = f"data.closing_text={text!r}"
    example = f"write for instance {style.forced_suffix!r}"
    if not style.chat:
        raise UserError(f"{found}: a model of characters has its own tokens; write null")
    if style.think_close and text.count(style.think_close) != 1:
        raise UserError(
            f"{found}: must hold {style.think_close!r} once, which closes the thinking in the "
            f"prompt format {style.name!r}; {example}"
        )
    after = text.partition(style.think_close)[2] if style.think_close else text
    if after.count(style.answer_open) != 1 or not after.rstrip().endswith(style.answer_open):
        raise UserError(
            f"{found}: must end with {style.answer_open!r}, which opens the answer in the prompt "
            f"format {style.name!r}; {example}"
        )
    return dataclasses.replace(style, forced_suffix=text, natural_suffix=after)
