"""Tests that docs/equations.md names only functions, modules, files and config keys that exist."""

import dataclasses
import importlib
import json
import re
from pathlib import Path

import jax
import numpy as np

import hf_world
from bacr_jax import rewards
from bacr_jax.config import ConditioningConfig
from bacr_jax.config.io import schema
from bacr_jax.types import Branches

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src/bacr_jax"
SPAN = re.compile(r"`([^`]+)`")


def module_of(name):
    for full in (f"bacr_jax.{name}", name):
        try:
            return importlib.import_module(full)
        except ModuleNotFoundError:
            pass
    return None


def exists(span):
    """True for a config key, an expression, a module, and a function named with its module."""
    if span.partition("=")[0] in schema():
        return True
    if "(" in span:
        return eval(span, {"jax": jax, "rewards": rewards}) is not None
    if module_of(span) is not None:
        return True
    module, _, name = span.rpartition(".")
    return bool(module) and hasattr(module_of(module), name)


def unknown(text):
    """The names that do not exist. `X` in `model/y.py` is looked up in this file's module."""
    missing = []
    for line in text.splitlines():
        names = []
        for span in SPAN.findall(line):
            if not span.endswith(".py"):
                names += [] if exists(span) else [span]
                continue
            path = next((base / span for base in (ROOT, SRC) if (base / span).is_file()), None)
            if path is None:
                missing.append(span)
            elif path.is_relative_to(SRC):
                module = path.relative_to(SRC.parent).with_suffix("")
                module = importlib.import_module(".".join(module.parts))
                names = [name for name in names if not hasattr(module, name)]
        missing += names
    return missing


def test_what_the_equations_name_exists():
    text = (ROOT / "docs/equations.md").read_text()
    # This attribute of every function with static arguments is named without a function.
    assert hasattr(rewards.cut_points, "static_argnames")
    assert unknown(text.replace("`static_argnames`", "")) == []


def test_the_lines_for_a_pretrained_model_run(tmp_path, monkeypatch):
    """With a tiny model, two questions, and no answer that a model sampled."""
    page = (ROOT / "docs/equations.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    tokenizer = hf_world.chat_tokenizer()
    config = dataclasses.replace(hf_world.TINY, vocab_size=len(tokenizer))
    hf_world.make_folder("tiny", config, tokenizer=tokenizer)
    Path("data/gsm8k").mkdir(parents=True)
    for name, start in (("train", 0), ("test", 100)):
        rows = [
            {"question": f"{n} apples?", "answer": f"#### {n}"} for n in range(start, start + 30)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        Path(f"data/gsm8k/{name}.jsonl").write_text(text)
    block = block.replace("models/Qwen2.5-0.5B-Instruct", "tiny")
    # The tokenizer has one token per character, so prompts are longer than those of the config.
    block = block.replace('"tiny"}', '"tiny", "data.max_prompt_tokens": 2000}')
    names = {
        "key": jax.random.key(0),
        "CONDITIONING": ConditioningConfig(),
        "rows": np.array([0, 1, 1]),
        "budgets": np.array([64, 64, 512]),
    }
    exec(block, names)
    assert names["MODEL"] == config and "budget" in names["params"]
    assert names["prompts"].tokens.shape[0] == 3
    assert names["RULES"].allowed_tokens.shape == (len(tokenizer),)
    references = names["task"].train.set.answers
    texts = [f"<answer>{references[0]}</answer>", "<answer>x</answer>", f"{references[1]}</answer>"]
    ids = [tokenizer(text.removeprefix("<answer>"))["input_ids"] for text in texts]
    tokens = np.zeros((3, 1, max(map(len, ids))), np.int32)
    for row, row_ids in enumerate(ids):
        tokens[row, 0, : len(row_ids)] = row_ids
    sampled = np.array([[len(row_ids)] for row_ids in ids])
    empty = Branches.empty(3, 1, width=tokens.shape[2], sampled=1)
    branches = dataclasses.replace(empty, tokens=tokens, sampled=sampled)
    np.testing.assert_array_equal(names["grade"](None, branches), [[1], [0], [1]])
    names["task"].close()


def test_a_name_that_does_not_exist_is_found():
    lines = [
        "`budget_embedding` in `model/budget.py`",
        "`curriculum.sample_budget`, `curriculum.sample_budgets`, `curriculum.clip_mu`",
        "`model/values.py` and `value.inputs`, `value.input=raw`",
        "`embed`",
    ]
    missing = ["budget_embedding", "curriculum.sample_budget", "model/values.py", "value.inputs"]
    assert unknown("\n".join(lines)) == [*missing, "embed"]
