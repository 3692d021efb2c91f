"""Writes the model card (README.md) of an exported policy: origin, accuracy and usage."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bacr_jax import __version__, files
from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.derived import cap, mixture
from bacr_jax.config.presets import preset_of
from bacr_jax.config.settings import resolve
from bacr_jax.evaluation.folder import RESULTS, SPLIT, read_results
from bacr_jax.model.hf.hub import cached_name
from bacr_jax.model.hf.vocabulary import check_links
from bacr_jax.prompts.budget_prompt import budget_words
from bacr_jax.prompts.formats import PromptFormat
from bacr_jax.report.html_page import templates
from bacr_jax.report.run_data import malformed_files_refused, read_evaluations
from bacr_jax.report.table import NONE, accuracy_text, budget_name, by_size, set_titles
from bacr_jax.runs.folder import RunPaths
from bacr_jax.runs.provenance import commit

# Files of a model folder that may contain its license.
_LICENSES = ("LICENSE", "LICENSE.txt", "LICENSE.md")
# Matches the path of a file in the same repository, such as "LICENSE", without scheme and "..".
_RELATIVE_LINK = re.compile(r"(?:\./)?(\w[\w.-]*(?:/\w[\w.-]*)*)")
_templates = templates(Path(__file__).with_name("templates"))
_templates.filters["number"] = "{:,}".format


@dataclass(frozen=True)
class Exported:
    """An exported policy, as described by its model card.

    Attributes:
      run: run folder.
      step: step of the checkpoint.
      config: config of the run.
      style: prompt format.
      base: folder of the model from which training started, or None for random weights.
      merged: True if the folder does not contain the code that enforces budgets.
    """

    run: Path
    step: int
    config: Config
    style: PromptFormat
    base: Path | None
    merged: bool

    @property
    def words(self) -> str:
        """Returns the sentence with the budget in prompts, or "" if prompts have no budget."""
        return budget_words(resolve(self.config).task.budget_text, self.style)


@dataclass(frozen=True)
class License:
    """The license of a model.

    Attributes:
      name: name of the license.
      metadata: entries of a model card's header. The Hub accepts only identifiers of its list as
        `license`, and the name of another license as `license_name`. Empty if no such entries are
        known.
    """

    name: str
    metadata: Mapping[str, str] = field(default_factory=dict)


def license_of(base: Path | None) -> License | None:
    """Returns the license of a model folder, or None if it is unknown.

    The license is read from the metadata of the model card, else from the first line of a license
    file.

    Raises:
      UserError: one of the files is a link that points outside of the folder.
    """
    if base is None:
        return None
    check_links(base, ("README.md", *_LICENSES))
    try:
        card = files.read_file(base / "README.md").decode()
        head = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
        metadata = (yaml.safe_load(head[1]) if head else None) or {}
        if isinstance(metadata, dict) and isinstance(metadata.get("license"), str):
            cached = cached_name(base)
            return _license_in(metadata, None if cached is None else cached[0])
    except (OSError, ValueError, yaml.YAMLError):
        pass
    for name in _LICENSES:
        try:
            lines = files.read_file(base / name).decode().strip().splitlines()
        except (OSError, ValueError):
            continue
        if lines:
            return License(lines[0].strip())
    return None


def _license_in(metadata: Mapping[str, Any], repository: str | None) -> License:
    """Returns the license in the metadata of a model card, in which `license` is a text.

    Args:
      metadata: metadata of the model card.
      repository: OWNER/NAME of the model on the Hub, or None if it is unknown.
    """
    identifier = metadata["license"]
    name = str(metadata.get("license_name") or identifier)
    if not re.fullmatch(r"[a-z0-9.-]+", identifier):
        return License(name)
    entries = {"license": identifier}
    if identifier == "other" and name != identifier:
        entries["license_name"] = name
    link = _absolute_link(metadata.get("license_link"), repository)
    if identifier == "other" and link is not None:
        entries["license_link"] = link
    return License(name, entries)


def _absolute_link(link: Any, repository: str | None) -> str | None:
    """Returns a license link that is valid in another repository, or None if there is none.

    The Hub accepts the name of a file in the repository of the card, or a URL. The license file of
    the base is not exported, so its name becomes the URL of the file in the base's repository.

    Args:
      link: value of `license_link` in the base's model card.
      repository: OWNER/NAME of the base on the Hub, or None if it is unknown.
    """
    if not isinstance(link, str):
        return None
    if re.match("https?://", link):
        return link
    relative = _RELATIVE_LINK.fullmatch(link)
    if relative is None or repository is None:
        return None
    return f"https://huggingface.co/{repository}/blob/main/{relative[1]}"


def _tables(exported: Exported) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yields (title, header, rows) of a table for each evaluated set of the run.

    Evaluations of the training split are left out, because they measure no new questions.
    """
    paths = RunPaths(exported.run)
    # Pairs of a description of the evaluation and its results by set.
    evaluations: list[tuple[str, Any]] = []
    for record in read_evaluations(paths.evaluations):
        if record["step"] == exported.step:
            evaluations = [("in training", record["sets"])]
    for later in paths.evaluations_of(exported.step):
        if (later / RESULTS).is_file():
            results = read_results(later)
            if SPLIT in results.get("settings", {}):
                continue
            by_budget = {name: result["by_budget"] for name, result in results["sets"].items()}
            evaluations.append(("afterwards", by_budget))
    for when, sets in evaluations:
        titles = set_titles(sets)
        for name, modes in sets.items():
            budgets = by_size({budget for entries in modes.values() for budget in entries})
            title = f"{titles[name]}, evaluated {when}"
            header = ["decoding", "problems", *map(budget_name, budgets)]
            rows = [_table_row(mode, entries, budgets) for mode, entries in modes.items()]
            yield title, header, rows


def _table_row(mode: str, entries: Mapping[str, Any], budgets: Iterable[str]) -> list[str]:
    """Returns the cells of a table row: mode, number of problems, accuracy at each budget."""
    first = next(iter(entries.values()))
    samples = first["samples"]
    name = f"{mode}, mean of {samples}" if samples > 1 else mode
    cells = [name, f"{first['problems']:,}"]
    for budget in budgets:
        cells.append(accuracy_text(entries[budget]) if budget in entries else NONE)
    return cells


def model_card(exported: Exported) -> str:
    """Returns the text of the model card, with accuracies from the run's evaluations."""
    config = exported.config
    base_license = license_of(exported.base)
    head = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if base_license is not None:
        head.update(base_license.metadata)
    system = config.data.system_prompt
    with malformed_files_refused(f"{exported.run}: evaluations of step {exported.step} hold"):
        tables = list(_tables(exported))
    card = _templates.get_template("model_card.md.jinja").render(
        exported=exported,
        config=config,
        preset=preset_of(config_io.flatten(config)),
        budget=config.budget,
        rollout=config.rollout,
        head=yaml.safe_dump(head, sort_keys=False),
        cap=cap(config.budget),
        budget_in_prompt=exported.merged or exported.words or exported.style.budget_close,
        tables=tables,
        base=exported.base and f"`{exported.base.absolute().name}`",
        sets=[name.partition("?")[0] for _, name in mixture(config.data.train)],
        system=None if system is None else json.dumps(system, ensure_ascii=False),
        license=base_license and base_license.name,
        version=__version__,
        commit=commit(),
    )
    return f"{card}\n"
