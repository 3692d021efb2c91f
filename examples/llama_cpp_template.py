"""Example that writes a chat template with which llama-server's chat endpoint enforces budgets.

    python examples/llama_cpp_template.py hf > policy.jinja
    llama-server --model policy.gguf --jinja --chat-template-file policy.jinja

llama.cpp finds the thinking tags by rendering a conversation with `reasoning_content`, which the
exported template refuses. This template renders the same prompt, and also such conversations.
`--message` prints the part of the closing text that precedes the closing tag.
docs/llama-cpp.md has the requests. Needs jinja2, which transformers installs.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import jinja2

QUESTION, NUMBER = "\ue000", 918273645
CLOSE = "</think>"
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{- HEAD ~ (message.content | trim) -}}
{%- if budget is defined -%}{{- BEFORE ~ budget ~ AFTER -}}{%- else -%}{{- PLAIN -}}{%- endif -%}
{%- elif message.role == 'assistant' -%}
{{- TAIL ~ (message.reasoning_content or '') ~ CLOSE ~ message.content -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- TAIL -}}{%- endif -%}
"""


def render(template: str, **variables: Any) -> str:
    """Renders an exported chat template for a placeholder question."""

    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    compiled = environment.from_string(template, globals={"raise_exception": refuse})
    return compiled.render(messages=[{"role": "user", "content": QUESTION}], **variables)


def literal(text: str) -> str:
    """Returns a text as a Jinja string literal."""
    return json.dumps(text, ensure_ascii=False)


def chat_template(exported: str, think_open: str) -> str:
    """Returns the template for llama.cpp.

    Args:
      exported: chat template of an exported folder.
      think_open: text at the end of the prompt that opens the thinking.

    Raises:
      ValueError: the template does not open the thinking, or ignores the budget.
    """
    head, _, tail = render(exported).partition(QUESTION)
    told = render(exported, budget=NUMBER).partition(QUESTION)[2]
    before, number, after = told.partition(str(NUMBER))
    if not think_open or not tail.endswith(think_open):
        raise ValueError("the chat template does not open the thinking; export a native policy")
    if not number:
        raise ValueError("the chat template ignores the budget; train with budget_input=prompt")
    # The end of the user's turn, which opens the thinking, is the same with and without a budget.
    ending = os.path.commonprefix([tail[::-1], after[::-1]])[::-1]
    parts = {
        "CLOSE": f"\n{CLOSE}\n",
        "HEAD": head,
        "BEFORE": before,
        "AFTER": after.removesuffix(ending),
        "PLAIN": tail.removesuffix(ending),
        "TAIL": ending,
    }
    return re.sub(r"\b[A-Z]{4,}\b", lambda name: literal(parts[name[0]]), TEMPLATE)


def main() -> int:
    """Prints the template or the message."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="exported folder of the policy")
    parser.add_argument("--message", action="store_true", help="print the closing text instead")
    options = parser.parse_args()
    try:
        config = json.loads((options.folder / "config.json").read_text())
        style = config["thinking"]["prompt_format"]
        exported = (options.folder / "chat_template.jinja").read_text()
        template = chat_template(exported, style["think_open"])
    except OSError as error:
        print(f"{error.filename}: {error.strerror}; use an exported folder", file=sys.stderr)
        return 2
    except (KeyError, ValueError) as error:
        print(f"{options.folder}: {error}", file=sys.stderr)
        return 2
    print(style["forced_suffix"].partition(CLOSE)[0] if options.message else template, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
