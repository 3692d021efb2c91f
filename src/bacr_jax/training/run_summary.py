"""Describes a run in a few lines, which are printed before its first step and at its end.

A training run prints `start_lines` before its first progress bar and `next_lines` after its last
one. `bacr train --check` ends with `start_lines`. Nothing is computed on a device.
"""

import math
import os
import shlex
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from bacr_jax.config import Config, WarmupConfig
from bacr_jax.config import io as config_io
from bacr_jax.config.budget_checks import budget_warnings
from bacr_jax.config.derived import mixture
from bacr_jax.config.presets import method_text, preset_of
from bacr_jax.config.settings import MethodSettings, resolve
from bacr_jax.curriculum import stage_limit
from bacr_jax.errors import UserError
from bacr_jax.methods import Method, registry
from bacr_jax.methods.published import departures
from bacr_jax.model import adapters
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.parallel import host_memory
from bacr_jax.parallel.compile_cache import CacheFolder
from bacr_jax.parallel.mesh import MeshShape
from bacr_jax.prompts.task_data import TaskData
from bacr_jax.questions.question_set import LeftOut
from bacr_jax.questions.splits import REASON as HELD_OUT
from bacr_jax.report.table import set_title
from bacr_jax.runs.folder import RunPaths, steps_in
from bacr_jax.training.run import total_steps

# Width of the column with the labels, in characters.
_LABEL_WIDTH = 9
# Placeholder for a space inside a command, at which a line must not be wrapped.
_FIXED_BLANK = "\0"
# Maximum number of characters of a question that is repeated in a command.
_MAX_QUESTION = 40
# Text that replaces the description of the devices in a check, which must not use a device.
NO_DEVICES = "not looked at by --check; bacr doctor tries them"


@dataclass(frozen=True)
class RunFacts:
    """The facts about a run that are printed before its first step.

    Attributes:
      config: config of the run.
      folder: run folder. A check passes a folder that may not exist.
      method: method built from the config.
      shape: shape of the model.
      task_data: questions and prompts.
    """

    config: Config
    folder: Path
    method: Method
    shape: Qwen2Config
    task_data: TaskData


def start_lines(facts: RunFacts, devices: str, width: int, *, is_check: bool = False) -> list[str]:
    """Returns lines that describe the method, the model, the devices and the size of a run.

    Args:
      facts: facts about the run.
      devices: description of the devices, or `NO_DEVICES`.
      width: maximum line width in characters. Commands and paths are never broken.
      is_check: True for `--check`, which lists departures from the publication and left-out
        questions before these lines. The run folder may not exist.
    """
    entries = {
        "method": [_method(facts, is_check)],
        "model": [_model(facts)],
        "devices": [devices],
        "run": _size(facts, is_check),
    }
    lines = []
    for label, parts in entries.items():
        indent = f"{label:{_LABEL_WIDTH}}"
        for part in parts:
            wrapped = _wrapped(part, width, indent, " " * _LABEL_WIDTH)
            lines += [line.replace(_FIXED_BLANK, " ") for line in wrapped]
            indent = " " * _LABEL_WIDTH
    for warning in untrained_budgets(resolve(facts.config).method, facts.method):
        lines += _wrapped(warning, width, "", " " * _LABEL_WIDTH)
    return lines


def _wrapped(text: str, width: int, first_indent: str, indent: str) -> list[str]:
    """Wraps a text into lines of at most `width` characters. Longer words are not broken."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=first_indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _fixed(text: str) -> str:
    """Replaces the spaces of a text, so that `_wrapped` does not break it across lines."""
    return text.replace(" ", _FIXED_BLANK)


def check_lines(facts: RunFacts) -> Iterator[str]:
    """Yields the lines about data sets, departures from the publication and the run for `--check`.

    Args:
      facts: facts about the run. The run folder may not exist.
    """
    width = shutil.get_terminal_size().columns
    for line in facts.task_data.describe_data(facts.config.eval.size):
        yield from _wrapped(line, width, "", "    ")
    for departure in departures(resolve(facts.config).method, facts.method):
        yield f"  {departure}"
    yield from start_lines(facts, NO_DEVICES, width, is_check=True)


def hint_lines(facts: RunFacts, cache: CacheFolder) -> list[str]:
    """Returns warnings and advice about a run before it starts. Usually there are none.

    Args:
      facts: facts about the run.
      cache: folder of the compilation cache.
    """
    lines = []
    if host_memory.lacks_huge_pages(facts.shape.num_parameters):
        variable = f"{host_memory.TUNABLES}={host_memory.HUGE_PAGES}"
        lines.append(f"faster on this CPU with {variable} in its environment")
    lines += registry.advice(resolve(facts.config).method)
    markup_warning = facts.task_data.markup_warning()
    if markup_warning is not None:
        lines.append(markup_warning)
    if cache.refused:
        lines.append(cache.line)
    return lines


def _method(facts: RunFacts, is_check: bool) -> str:
    text = method_text(preset_of(config_io.flatten(facts.config)), facts.method.name)
    count = len(departures(resolve(facts.config).method, facts.method))
    if not count:
        return text
    plural = "departures" if count > 1 else "departure"
    if is_check:
        return f"{text}; {count} {plural} from its publication, listed above"
    command = _fixed(f"bacr methods --run {shlex.quote(str(facts.folder))}")
    return f"{text}; {count} {plural}: {command}"


def number_text(count: int) -> str:
    """Formats a number of parameters, such as `130,624`, `134.5 million` or `1.54 billion`."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} billion"
    if count >= 1e7:
        return f"{count / 1e6:.1f} million"
    return f"{count:,}"


def _model(facts: RunFacts) -> str:
    """Returns the name and the size of the model, and the origin of its initial weights."""
    config = facts.config
    model = config.model
    count = _fixed(f"{number_text(facts.shape.num_parameters)} parameters")
    if model.path is not None:
        text = f"{model.path}, {count}; weights from this folder"
    elif model.preset != "custom":
        text = f"random {model.preset}, {count}"
    else:
        text = f"random, {model.num_layers} layers of width {model.hidden_size}, {count}"
    trained = adapters.num_parameters(facts.shape, config.adapter)
    if trained:
        text += f"; trains {number_text(trained)} in LoRA of rank {config.adapter.rank}"
    saved_steps = steps_in(RunPaths(facts.folder).checkpoints)
    if saved_steps:
        text += f"; continues from step {saved_steps[-1]}"
    elif config.warmup.steps:
        text += f"; warm-up of {config.warmup.steps:,} steps"
        if config.warmup.dir is not None:
            text += f" in {config.warmup.dir}"
    return text


def _size(facts: RunFacts, is_check: bool) -> list[str]:
    """Returns texts about the steps, the budgets, the questions and the run folder."""
    config = facts.config
    rollout = config.rollout
    train = facts.task_data.train.set
    steps = total_steps(config.train, rollout, len(train))
    size = f"{steps:,} steps of {rollout.questions} questions x {rollout.group_size} traces"
    limit = config.train.max_generated_tokens
    if limit is not None:
        size += f", at most {limit:,} generated tokens"
    names = ", ".join(set_title(name) for _, name in mixture(config.data.train))
    list_command = "listed above"
    if not is_check:
        config_path = RunPaths(facts.folder).config
        list_command = _fixed(f"bacr data --config {shlex.quote(str(config_path))}")
    questions = f"{len(train):,} questions of {names}, {_left_out(train.left_out, list_command)}"
    evaluated = facts.task_data.eval.values()
    num_unevaluated = sum(len(prompted.set.left_out) for prompted in evaluated)
    if num_unevaluated:
        questions += f"; {num_unevaluated:,} left out of the evaluation sets"
    return [
        size,
        trained_budgets(resolve(config).method, facts.method),
        questions,
        f"in {_fixed(str(facts.folder))}; Ctrl-C saves and stops, the same command resumes",
    ]


def trained_budgets(settings: MethodSettings, method: Method) -> str:
    """Returns a text with the budgets that training samples, as a list or as a range.

    Args:
      settings: settings of the method.
      method: method built from the settings.
    """
    budget = settings.budget
    largest = budget.max
    if _samples_prior(settings, method):
        least, most = settings.budget_range
    elif settings.method not in registry.built_in_methods():
        return f"budgets up to {largest:,}"
    elif settings.method == "elastic":
        least = most = max(math.ceil(settings.elastic.share * largest), 1)
    else:
        least = most = largest
    limits = [
        stage_limit(budget.stages, step=stage, total_steps=len(budget.stages), b_max=largest)
        for stage in range(len(budget.stages))
    ] or [largest]
    if budget.prior == "choices" and _samples_prior(settings, method):
        sampled = {min(choice, limit) for choice in settings.budget_choices for limit in limits}
        key = "budget.choices" if budget.choices else "eval.budgets"
        noun = "budget" if len(sampled) == 1 else "budgets"
        return f"{noun} {', '.join(map(str, sorted(sampled)))} ({key})"
    least = min(least, *limits)
    most = min(most, max(limits))
    return f"budget {most:,}" if least == most else f"budgets {least:,} to {most:,}"


def untrained_budgets(settings: MethodSettings, method: Method) -> list[str]:
    """Returns warnings about budgets of the config that training never samples.

    Methods that do not use `budget.prior` train at `budget.max`, and cause no warning.

    Args:
      settings: settings of the method.
      method: method built from the settings.
    """
    if not _samples_prior(settings, method):
        return []
    warnings = budget_warnings(settings.budget, settings.evaluated)
    return [f"WARNING, {warning}" for warning in warnings]


def _samples_prior(settings: MethodSettings, method: Method) -> bool:
    """True if a method is known to sample its budgets from `budget.prior`.

    Built-in methods that do not truncate traces sample the budgets in their prompts.
    """
    is_built_in = settings.method in registry.built_in_methods()
    return method.follows_prior or (is_built_in and not method.truncates_at_budget)


def _left_out(rows: Sequence[LeftOut], list_command: str) -> str:
    """Returns a text with the numbers of left-out and of held-out training questions.

    Args:
      rows: rows of the training set that are not trained on.
      list_command: command that lists the rows, or a reference to their list.
    """
    held_out = sum(row.reason == HELD_OUT for row in rows)
    unusable = len(rows) - held_out
    text = f"{unusable:,} left out ({list_command})" if unusable else "none left out"
    return f"{text}, {held_out:,} {HELD_OUT}" if held_out else text


def devices_text(compute_dtype: str, mesh: MeshShape) -> str:
    """Describes the devices of a run, such as `1 CPU with 2 cores; computes in float32`.

    Args:
      compute_dtype: `model.compute_dtype`.
      mesh: number of devices along each mesh axis.
    """
    devices = jax.devices()
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        kind = f"CPU with {os.cpu_count()} cores"
    parts = [f"1 {kind}"]
    if len(devices) > 1:
        parts = [f"{len(devices)} x {kind}"]
        parts.append(f"data {mesh.data}, fsdp {mesh.fsdp}, tensor {mesh.tensor}")
    if jax.process_count() > 1:
        parts.append(f"{jax.process_count()} processes")
    return f"{'; '.join(parts)}; computes in {compute_dtype}"


def next_lines(
    method: MethodSettings, warmup: WarmupConfig, folder: Path, question: str
) -> Iterator[str]:
    """Yields commands for the time after a run: open its report, ask its policy, compare methods.

    Args:
      method: settings of the run's method.
      warmup: section `warmup` of the run's config.
      folder: run folder.
      question: a question of the first evaluation set.
    """
    run = shlex.quote(str(folder))
    budgets = [budget for budget in method.evaluated if budget] or [method.budget.max]
    ends = ",".join(map(str, dict.fromkeys([min(budgets), max(budgets)])))
    is_short = len(question) <= _MAX_QUESTION and question.isprintable()
    words = f" {shlex.quote(question)}" if is_short else ""
    yield f"{'look':{_LABEL_WIDTH}}bacr report --run {run}"
    yield f"{'ask':{_LABEL_WIDTH}}bacr generate --run {run} --budget {ends}{words}"
    label = "compare"
    for line in _comparison(method.method, warmup, folder):
        yield f"{label:{_LABEL_WIDTH}}{line}"
        label = ""


def _comparison(method: str, warmup: WarmupConfig, folder: Path) -> list[str]:
    """Returns the commands that train another method in the same way and compare both runs.

    If the config is incompatible with the other method, only the command for the comparison is
    returned, with a placeholder for the other run.
    """
    run = shlex.quote(str(folder))
    config_path = RunPaths(folder).config
    try:
        other_method = "bacr-bounded" if method == "grpo" else "grpo"
        other_config = config_io.load([config_path, f"methods/{other_method}"])
        config_io.check(other_config, also=registry.problems)
    except UserError:
        return [f"bacr report --run {run} --run OTHER_RUN"]
    other_folder = folder.with_name(f"{folder.name}-{other_method}")
    overrides = [f"output.dir={other_folder}"]
    if warmup.steps and warmup.dir is None:
        overrides.append(f"warmup.dir={RunPaths(folder).warmup}")
    return [
        f"bacr train --config {shlex.quote(str(config_path))} --config methods/{other_method} \\",
        f"  {shlex.join(overrides)}",
        f"bacr report --run {run} --run {shlex.quote(str(other_folder))}",
    ]
