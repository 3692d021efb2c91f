"""Generates the chat template of an exported folder: the policy's prompt as a Jinja template."""

from collections.abc import Mapping
from typing import Any

from bacr_jax.errors import UserError
from bacr_jax.prompts.budget_prompt import budget_frame
from bacr_jax.prompts.chat_template import BASE, render, template_of
from bacr_jax.prompts.encoding import frame
from bacr_jax.prompts.formats import PromptFormat

_CHECKS = """\
{%- if messages | length > 2 or messages[0]['role'] != 'user' or (messages | length == 2 and \
messages[1]['role'] != 'assistant') -%}
{{- raise_exception('this policy was trained on a question alone: write one user message, and \
behind it at most the beginning of the answer') -}}
{%- endif -%}
"""
# The content of a message is a string, or a list of parts that each contain a text.
_TEXT_OF = """\
{%- macro text_of(content) -%}
{%- if content is string -%}
{{- content -}}
{%- elif content is undefined or content is mapping or content is not sequence -%}
{{- raise_exception('content: write a text, or a list of parts of the type text') -}}
{%- else -%}
{%- for part in content -%}
{%- if part is mapping and part['type'] == 'text' and part['text'] is string -%}
{{- part['text'] -}}
{%- else -%}
{{- raise_exception('content: this policy reads text alone, so every part is of the type text') -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""
_READ_BUDGET = """\
{%- set levels = LEVELS -%}
{%- set number = none -%}
{%- if budget is defined and budget is not none and budget != 'none' -%}
{%- set number = levels[budget] if budget in levels else budget -%}
{%- if number is not integer or number < 0 -%}
{{- raise_exception('budget: expected a whole number of thinking tokens') -}}
{%- endif -%}
{%- endif -%}
"""
_BEGUN = "{%- if messages | length == 2 -%}{{- text_of(messages[1]['content']) -}}{%- endif -%}"

# The base model's template is inserted between these two lines.
_IF_BASE = f"{{% if {BASE} is defined and {BASE} %}}\n"
_ELSE = "{% else %}\n"


def literal(text: str) -> str:
    """Returns a text as a Jinja string literal."""
    return '"' + text.encode("unicode_escape").decode("ascii").replace('"', '\\"') + '"'


def chat_template(
    tokenizer: Any, style: PromptFormat, words: str = "", levels: Mapping[str, int] | None = None
) -> str:
    """Returns the chat template of a policy's prompt.

    The template accepts one user message with the question, optionally followed by the beginning of
    an answer. If the policy was trained with budgets in its prompts, the template variable
    `budget=512` adds the budget to the prompt. With `base_template=true`, it renders the base
    model's template, which this package uses for further training.

    Args:
      tokenizer: tokenizer of the base model.
      style: prompt format.
      words: sentence with the placeholder `{budget}` that specifies the budget in prompts, or "" if
        prompts do not contain the budget.
      levels: named budgets, in tokens.

    Raises:
      UserError: the base model's template does not work inside another template, or drops the
        sentence.
    """
    head, tail = frame(tokenizer, style)
    # Text before and after the number of the budget, or None if prompts contain no budget.
    around_number: tuple[str, str] | None = None
    if style.budget_close:
        around_number = tail, style.budget_close
    elif words:
        _, opening, closing = budget_frame(tokenizer, style, words)
        around_number = opening, closing
    question = f"{{{{- {literal(head)} ~ (text_of(messages[0]['content']) | trim) -}}}}\n"
    ending = f"{{{{- {literal(tail)} -}}}}"
    if around_number is not None:
        opening, closing = around_number
        with_number = f"{{{{- {literal(opening)} ~ number ~ {literal(closing)} -}}}}"
        pairs = [f"{literal(name)}: {tokens}" for name, tokens in (levels or {}).items()]
        table = "{" + ", ".join(pairs) + "}"
        question = _READ_BUDGET.replace("LEVELS", table) + question
        ending = (
            f"{{%- if number is not none -%}}{with_number}{{%- else -%}}{ending}{{%- endif -%}}"
        )
    policy_template = _CHECKS + _TEXT_OF + question + ending + "\n" + _BEGUN
    if not style.chat:
        return policy_template + "\n"
    template = f"{_IF_BASE}{_base(tokenizer)}{_ELSE}{policy_template}\n{{%- endif -%}}\n"
    messages = (style.system, "two")
    expected = render(tokenizer, style, *messages)
    if render(tokenizer, style, *messages, template=template) != expected:
        raise UserError(
            "tokenizer: the export inserts the tokenizer's chat template into a larger template, "
            "in which it gives different text than by itself; use the tokenizer of an Instruct "
            "model"
        )
    return template


def _base(tokenizer: Any) -> str:
    """Returns the base model's template, without the template that this package adds around it."""
    text = template_of(tokenizer)
    if text.startswith(_IF_BASE) and _ELSE + _CHECKS in text:
        return text.removeprefix(_IF_BASE).partition(_ELSE + _CHECKS)[0]
    return text.removesuffix("\n")
