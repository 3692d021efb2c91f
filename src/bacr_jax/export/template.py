"""The chat template of an exported folder: the policy's own prompt, as Jinja."""

from collections.abc import Mapping
from typing import Any

from bacr_jax.config.checks import BUDGET
from bacr_jax.errors import UserError
from bacr_jax.prompts.chat_template import BASE, render, template_of
from bacr_jax.prompts.encoding import frame
from bacr_jax.prompts.formats import PromptFormat

# Stands for the number of a budget while the base's template is rendered.
_NUMBER = "\ue001"

_CHECKS = """\
{%- if messages | length > 2 or messages[0]['role'] != 'user' or (messages | length == 2 and \
messages[1]['role'] != 'assistant') -%}
{{- raise_exception('this policy was trained on a question alone: write one user message, and \
behind it at most the beginning of the answer') -}}
{%- endif -%}
"""
# The content of a message is a text, or a list of parts of which each has a text.
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
{{- raise_exception('budget: write a whole number of thinking tokens') -}}
{%- endif -%}
{%- endif -%}
"""
_BEGUN = "{%- if messages | length == 2 -%}{{- text_of(messages[1]['content']) -}}{%- endif -%}"

# The base's template stands between these two.
_ASKED = f"{{% if {BASE} is defined and {BASE} %}}\n"
_ELSE = "{% else %}\n"


def literal(text: str) -> str:
    """A text as Jinja writes it."""
    return '"' + text.encode("unicode_escape").decode("ascii").replace('"', '\\"') + '"'


def chat_template(
    tokenizer: Any, style: PromptFormat, words: str = "", levels: Mapping[str, int] | None = None
) -> str:
    """The text of the template.

    It takes one user message, the question, and behind it the beginning of an answer if there is
    one. With `budget=512` the prompt tells the budget, for a policy that is told in its prompt.
    With `base_template=true` it is the base's own template, which is how this package reads it.

    Args:
      words: sentence that tells the budget, `{budget}` being its number; "": none does.
    """
    head, tail = frame(tokenizer, style)
    before, _, after = words.partition(BUDGET)
    told = frame(tokenizer, style, said=before + _NUMBER + after)[1] if words else ""
    if style.budget_close:
        told = tail + _NUMBER + style.budget_close
    asked = f"{{{{- {literal(head)} ~ (text_of(messages[0]['content']) | trim) -}}}}\n"
    untold = f"{{{{- {literal(tail)} -}}}}"
    if told:
        opening, _, closing = told.partition(_NUMBER)
        said = f"{{{{- {literal(opening)} ~ number ~ {literal(closing)} -}}}}"
        table = ", ".join(f"{literal(name)}: {tokens}" for name, tokens in (levels or {}).items())
        asked = _READ_BUDGET.replace("LEVELS", "{" + table + "}") + asked
        untold = f"{{%- if number is not none -%}}{said}{{%- else -%}}{untold}{{%- endif -%}}"
    ours = _CHECKS + _TEXT_OF + asked + untold + "\n" + _BEGUN
    if not style.chat:
        return ours + "\n"
    whole = f"{_ASKED}{_base(tokenizer)}{_ELSE}{ours}\n{{%- endif -%}}\n"
    messages = style.system, "two"
    if render(tokenizer, style, *messages, template=whole) != render(tokenizer, style, *messages):
        raise UserError(
            "tokenizer: its chat template writes something else when it stands inside another; "
            "write the folder of an Instruct model"
        )
    return whole


def _base(tokenizer: Any) -> str:
    """The base's template; that inside ours, where the base is an exported folder itself."""
    text = template_of(tokenizer)
    if text.startswith(_ASKED) and _ELSE + _CHECKS in text:
        return text.removeprefix(_ASKED).partition(_ELSE + _CHECKS)[0]
    return text.removesuffix("\n")
