"""The template for llama.cpp renders the exported template's prompt, and what it is probed with."""

import json
import runpy
from pathlib import Path

import jinja2
import pytest

import hf_world
from bacr_jax.export.template import chat_template as exported_template
from bacr_jax.prompts.formats import FORMATS

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "llama_cpp_template.py"))
WORDS = "Think for at most {budget} tokens."
ASKED = [{"role": "user", "content": "What is 7 times 8?"}]


def render(template, messages=ASKED, **variables):
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(messages=messages, **variables)


@pytest.fixture(scope="module", params=["think_answer", "native"])
def templates(request):
    style = FORMATS[request.param]
    tokenizer = hf_world.chat_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    exported = exported_template(tokenizer, style, words=WORDS)
    return style, exported, SCRIPT["chat_template"](exported, style.think_open)


@pytest.mark.parametrize("variables", [{}, {"budget": 512}, {"budget": 0}])
def test_the_prompt_is_that_of_the_exported_template(templates, variables):
    style, exported, ours = templates
    prompt = render(ours, add_generation_prompt=True, **variables)
    assert prompt == render(exported, **variables)
    assert prompt.endswith(style.think_open)


def test_thinking_of_a_finished_turn_stands_between_the_tags(templates):
    _, _, ours = templates
    answer = {"role": "assistant", "content": "56", "reasoning_content": "7 x 8"}
    text = render(ours, [*ASKED, answer], add_generation_prompt=False)
    assert text.endswith("<think>\n7 x 8\n</think>\n56")
    opened = render(ours, add_generation_prompt=True)
    assert opened.removeprefix(render(ours, add_generation_prompt=False)).endswith("<think>\n")


def test_a_template_without_a_budget_or_a_tag_is_refused():
    tokenizer = hf_world.chat_tokenizer()
    plain = exported_template(tokenizer, FORMATS["think_answer"])
    with pytest.raises(ValueError, match="ignores the budget"):
        SCRIPT["chat_template"](plain, "<think>\n")
    boxed = exported_template(tokenizer, FORMATS["boxed"], words=WORDS)
    with pytest.raises(ValueError, match="does not open the thinking"):
        SCRIPT["chat_template"](boxed, "")


def test_the_command_prints_template_and_closing_text_or_one_line(tmp_path, monkeypatch, capsys):
    style = FORMATS["think_answer"]
    told = {"think_open": style.think_open, "forced_suffix": style.forced_suffix}
    (tmp_path / "config.json").write_text(json.dumps({"thinking": {"prompt_format": told}}))
    exported = exported_template(hf_world.chat_tokenizer(), style, words=WORDS)
    (tmp_path / "chat_template.jinja").write_text(exported)
    monkeypatch.setattr("sys.argv", ["llama_cpp_template.py", str(tmp_path), "--message"])
    assert SCRIPT["main"]() == 0 and capsys.readouterr().out == "\n"
    monkeypatch.setattr("sys.argv", ["llama_cpp_template.py", str(tmp_path / "absent")])
    assert SCRIPT["main"]() == 2
    error = capsys.readouterr().err
    assert "use an exported folder" in error and error.count("\n") == 1
