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
from bacr_jax.config.derived import cap, mixture
from bacr_jax.evaluation.folder import RESULTS, read_results
from bacr_jax.model.hf.vocabulary import check_links
from bacr_jax.prompts.formats import PromptFormat
from bacr_jax.prompts.told import budget_words
from bacr_jax.report.html_page import templates
from bacr_jax.report.run_data import odd_refused, read_evaluations
from bacr_jax.report.table import NONE, accuracy_text, budget_name, by_size, set_title
from bacr_jax.runs.folder import RunPaths
from bacr_jax.runs.provenance import commit

# Files in which a model's folder may say its license.
_LICENSES = ("LICENSE", "LICENSE.txt", "LICENSE.md")
_templates = templates(Path(__file__).with_name("templates"))
_templates.filters["number"] = "{:,}".format


@dataclass(frozen=True)
class Exported:
    """The policy that a card is about.

    Attributes:
      base: folder of the model that training started from; None: random weights.
      merged: the folder has no code of ours.
    """

    run: Path
    step: int
    config: Config
    style: PromptFormat
    base: Path | None
    merged: bool

    @property
    def words(self) -> str:
        """The sentence that tells the policy its budget; "": none does."""
        return budget_words(self.config, self.style)


def license_of(base: Path | None) -> str | None:
    """Returns what a model's folder names as its license, or the first line of its text, or None.

    UserError: one of the files that are read is a link to outside of the folder.
    """
    if base is None:
        return None
    check_links(base, ("README.md", *_LICENSES))
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


def _tables(about: Exported) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Title, header and rows of the accuracies of each set, by the run's own evaluations."""
    paths, made = RunPaths(about.run), dict[str, Any]()
    records = [r for r in read_evaluations(paths.evaluations) if r["step"] == about.step]
    if records:
        made["in training"] = records[-1]["sets"]
    later = paths.evaluation_of(about.step)
    if (later / RESULTS).is_file():
        sets = read_results(later)["sets"]
        made["afterwards"] = {name: result["by_budget"] for name, result in sets.items()}
    for when, sets in made.items():
        for name, modes in sets.items():
            budgets = by_size({budget for entries in modes.values() for budget in entries})
            rows = []
            for mode, entries in modes.items():
                first = next(iter(entries.values()))
                many = f", mean of {first['samples']}" if first["samples"] > 1 else ""
                cells = [accuracy_text(entries[b]) if b in entries else NONE for b in budgets]
                rows.append([f"{mode}{many}", f"{first['problems']:,}", *cells])
            title = f"{set_title(name.partition(':')[0])}, evaluated {when}"
            yield title, ["decoding", "problems", *map(budget_name, budgets)], rows


def model_card(about: Exported) -> str:
    """The text of the card; the policy's accuracy is that of its run's own evaluations."""
    config, known = about.config, license_of(about.base)
    head = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if known and re.fullmatch(r"[a-z0-9.-]+", known):
        head["license"] = known
    system = config.data.system_prompt
    with odd_refused(f"{about.run}: evaluations of step {about.step} hold"):
        tables = list(_tables(about))
    card = _templates.get_template("model_card.md.jinja").render(
        about=about,
        config=config,
        budget=config.budget,
        rollout=config.rollout,
        head=yaml.safe_dump(head, sort_keys=False),
        cap=cap(config),
        told_in_prompt=about.merged or about.words or about.style.budget_close,
        tables=tables,
        base=about.base and f"`{about.base.absolute().name}`",
        sets=[name.partition("?")[0] for _, name in mixture(config.data.train)],
        system=None if system is None else json.dumps(system, ensure_ascii=False),
        license=known,
        version=__version__,
        commit=commit(),
    )
    return f"{card}\n"
