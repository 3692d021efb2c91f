"""The model card (README.md) of an exported policy: what it is, what it can do, how it is asked."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bacr_jax import __version__, documents
from bacr_jax.config import Config
from bacr_jax.config.derived import mixture
from bacr_jax.documents import read_lines
from bacr_jax.evaluation.folder import RESULTS, read_results
from bacr_jax.prompts.formats import PromptFormat
from bacr_jax.report.table import NONE, accuracy_text, budget_name, by_size, set_title
from bacr_jax.runs.folder import RunPaths
from bacr_jax.runs.provenance import commit

# Files in which a model's folder may say its license.
_LICENSES = ("LICENSE", "LICENSE.txt", "LICENSE.md")


@dataclass(frozen=True)
class Exported:
    """The policy that a card is about.

    Attributes:
      words: sentence that tells the budget; "": none does.
      base: folder of the model that training started from; None: random weights.
      merged: the folder has no code of ours.
    """

    run: Path
    step: int
    config: Config
    style: PromptFormat
    words: str
    base: Path | None
    merged: bool

    @property
    def needs_code(self) -> bool:
        """Whether the budget is told by an embedding."""
        return self.config.conditioning.embeds


def license_of(base: Path | None) -> str | None:
    """What a model's folder says of its license: a name, or the first line of its text; or None."""
    if base is None:
        return None
    try:
        card = documents.read_file(base / "README.md").decode()
        head = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
        named = (yaml.safe_load(head[1]) if head else None) or {}
        if isinstance(named, dict) and isinstance(named.get("license"), str):
            return str(named.get("license_name") or named["license"])
    except (OSError, ValueError, yaml.YAMLError):
        pass
    for name in _LICENSES:
        try:
            lines = documents.read_file(base / name).decode().strip().splitlines()
        except (OSError, ValueError):
            continue
        if lines:
            return lines[0].strip()
    return None


def evaluations(run: Path, step: int) -> dict[str, Any]:
    """The run's evaluations of a checkpoint: {where: {set: {mode: {budget: entry}}}}."""
    paths = RunPaths(run)
    found = {}
    records = [r for r in read_lines(paths.evaluations) if r["step"] == step]
    if records:
        found["in training"] = records[-1]["sets"]
    later = paths.evaluation_of(step)
    if (later / RESULTS).is_file():
        sets = read_results(later)["sets"]
        found["afterwards"] = {name: result["by_budget"] for name, result in sets.items()}
    return found


def _accuracy(about: Exported) -> Iterator[str]:
    """Tables of accuracy by budget, one for each set."""
    made = evaluations(about.run, about.step)
    if not made:
        yield "This checkpoint was not evaluated by its run."
    for when, sets in made.items():
        for name, modes in sets.items():
            yield f"{set_title(name.partition(':')[0])}, evaluated {when}:\n"
            budgets = by_size({budget for entries in modes.values() for budget in entries})
            yield "| decoding | problems | " + " | ".join(map(budget_name, budgets)) + " |"
            yield "| --- | ---: |" + " ---: |" * len(budgets)
            for mode, entries in modes.items():
                first = next(iter(entries.values()))
                cells = [accuracy_text(entries[b]) if b in entries else NONE for b in budgets]
                many = f", mean of {first['samples']}" if first["samples"] > 1 else ""
                yield f"| {mode}{many} | {first['problems']:,} | " + " | ".join(cells) + " |"
            yield ""
    if made:
        yield (
            "Accuracy in percent by thinking budget in tokens, with 95 % intervals over problems. "
            "One training run, one seed: intervals say nothing of other seeds."
        )


def _trained_on(about: Exported) -> Iterator[str]:
    config = about.config
    base = "random weights" if about.base is None else f"`{about.base.absolute().name}`"
    warm = f", {config.warmup.steps} or more supervised steps" if config.warmup.steps else ""
    yield f"* Started from {base}{warm}."
    questions = config.rollout.questions
    sets = [name.partition("?")[0] for _, name in mixture(config.data.train)]
    yield (
        f"* Method `{config.method}`, {about.step} steps of {questions} questions x "
        f"{config.rollout.group_size} traces, seed {config.seed}, on the questions of "
        f"`{', '.join(sets)}` (training split)."
    )
    told = {
        "embedding": "by an embedding",
        "words": "in words",
        "both": "by an embedding and words",
    }
    how = told.get(config.conditioning.told, "not at all; thinking is cut there all the same")
    low, high = config.budget.min, config.budget.max
    yield f"* Budgets of {low:,} to {high:,} thinking tokens, told {how}."
    own = config.data.system_prompt
    said = "" if own is None else f" with the system message {json.dumps(own, ensure_ascii=False)}"
    yield (
        f"* Prompts of at most {config.data.max_prompt_tokens:,} tokens in the format "
        f"`{about.style.name}`{said}, answers of at most {config.rollout.answer_tokens:,}."
    )
    yield "* Nothing else was trained or tested: no conversation, no tools, no safety training."


_HELD = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
question = [{"role": "user", "content": "..."}]
inputs = tokenizer.apply_chat_template(
    question, SAIDreturn_tensors="pt", return_dict=True
)
print(tokenizer.decode(model.generate(**inputs, budget=BUDGET)[0]))
```

`budget` is a number of thinking tokens, 0 (answer at once), None (told none, thinks up to CAP)\
LEVELS, or a list with one of these per row. Thinking is cut there, the closing text is written, \
and the answer follows: at most ANSWER tokens.
`pipeline("text-generation", model=FOLDER, trust_remote_code=True)` takes `budget=` too.

In vLLM with the plugin `bacr-vllm`, which lies beside bacr_jax; no code of this folder runs there:

```python
from bacr_vllm import generate_within
from vllm import LLM

(answer,) = generate_within(LLM(FOLDER), [question], [BUDGET])
print(answer.text)
```
"""
_MERGED = """\
A plain Qwen2 model without code of its own, for any engine. The chat template tells the budget, \
and nothing holds it:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(FOLDER)
model = AutoModelForCausalLM.from_pretrained(FOLDER)
question = [{"role": "user", "content": "..."}]
inputs = tokenizer.apply_chat_template(
    question, budget=BUDGET, return_tensors="pt", return_dict=True
)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=MOST)[0]))
```
"""


def _asked(about: Exported) -> str:
    config = about.config
    budget = config.budget.max
    levels = "".join(f', "{name}" ({tokens:,})' for name, tokens in config.budget.levels.items())
    in_prompt = about.words or about.style.budget_close
    text = _MERGED if about.merged else _HELD
    cap = config.budget.max if config.budget.cap is None else config.budget.cap
    values = {
        "FOLDER": '"FOLDER"',
        "SAID": f"budget={budget}, " if in_prompt else "",
        "BUDGET": str(budget),
        "CAP": f"{cap:,} tokens",
        "LEVELS": levels,
        "ANSWER": f"{config.rollout.answer_tokens:,}",
        "MOST": str(budget + config.rollout.answer_tokens),
    }
    return re.sub("|".join(values), lambda found: values[found[0]], text)


def model_card(about: Exported) -> str:
    """The text of the card; the policy's accuracy is that of its run's own evaluations."""
    known = license_of(about.base)
    name = f"{about.run.absolute().name}, step {about.step}"
    if about.base is None:
        rights = "Trained from random weights: no license of a base applies."
    elif known:
        rights = f"License of the base: {known}, as its folder says."
    else:
        rights = "License of the base: unknown; its folder does not say."
    head = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if known and re.fullmatch(r"[a-z0-9.-]+", known):
        head["license"] = known
    made = commit()
    origin = f"bacr_jax {__version__}" + (f", commit {made}" if made else "")
    code = ""
    if about.needs_code:
        code = (
            "\nWithout `trust_remote_code=True` transformers loads the plain model, names the "
            "tensors that it leaves out, and refuses `budget=`.\n"
        )
    parts = [
        "---\n" + yaml.safe_dump(head, sort_keys=False) + "---",
        f"# {name}\n\nA policy that reasons within a token budget, a field of each request.",
        "## How it is asked\n\n" + _asked(about).rstrip() + "\n" + code,
        "## Accuracy by budget\n\n" + "\n".join(_accuracy(about)),
        "## What it was trained on\n\n" + "\n".join(_trained_on(about)),
        f"## Origin\n\nExported by {origin}. {rights}",
    ]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"
