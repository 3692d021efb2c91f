"""Implements `bacr evaluate --run DIR | --model HFDIR`.

The command measures the accuracy of a policy at several thinking budgets. This module parses the
command line and prepares the config. `evaluation.job` runs the evaluation.
"""

import argparse
import dataclasses
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bacr_io.command import INTERRUPTED
from bacr_jax.config import Config, DataConfig, EvalConfig
from bacr_jax.config import io as config_io
from bacr_jax.config.checks import TABLES, check_ranges
from bacr_jax.config.cli import (
    Parser,
    add_saved_policy,
    check_saved_policy,
    data_set,
    entry_point,
    failure,
    print_message,
    silence_orbax,
)
from bacr_jax.config.derived import NONE, read_budgets
from bacr_jax.config.engine import VLLM, add_engine, engine_faults
from bacr_jax.config.settings import resolve
from bacr_jax.config.values import shown
from bacr_jax.errors import UserError
from bacr_jax.evaluation.overrides import (
    DEFINES_POLICY,
    EVALUATED_KEYS,
    override_faults,
    server_faults,
)
from bacr_jax.out_of_memory import OutOfMemory

DESCRIPTION = (
    "Measures a policy at several thinking budgets: accuracy with 95 % intervals, pass@k, maj@k, "
    "anytime accuracy and tokens, as table, JSON, Markdown, LaTeX and pictures. The same command "
    "continues an evaluation that was interrupted."
)
EPILOG = (
    "Config keys of reading and answering questions can be overridden, such as "
    "data.question_column=problem or rollout.answer_tokens=256, and so can keys of speed, such as "
    "model.product_dtype=bfloat16 (docs/evaluation.md). With --model, "
    "conditioning.budget_input=prompt can be written too; it puts the budget into the prompt."
)
# Default values of the command-line options.
TEMPERATURE = 0.6
TOP_P = 0.95
SLOTS = 64
# Maximum number of characters in the name of the output folder, without its hash.
_MAX_NAME = 60
# Minimum and maximum value of each integer option.
_RANGES = {
    "samples": (0, 100_000),
    "size": (1, 2**31 - 1),
    "slots": (1, 1_000_000),
    "every": (1, 2**31 - 1),
    "self_consistency": (2, 100_000),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses and validates the command line.

    Raises:
      UserError: if an option or an override is invalid.
    """
    parser = Parser(prog="bacr evaluate", description=DESCRIPTION, epilog=EPILOG)
    add_saved_policy(parser)
    _add_sampling_options(parser)
    _add_job_options(parser)
    add_engine(parser)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    arguments = parser.parse_intermixed_args(argv)
    check_saved_policy(arguments)
    for faults in (_faults_of_numbers, engine_faults, _faults_of_files, _faults_of_overrides):
        for fault in faults(arguments):
            raise UserError(fault)
    return arguments


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for evaluation sets, budgets and sampling."""
    add = parser.add_argument
    add(
        "--data",
        type=data_set,
        action="append",
        default=[],
        metavar="NAME[:PATH]",
        help="evaluation set, repeatable; by default the run's data.eval",
    )
    # `bacr generate` calls this option --budget.
    add(
        "--budgets",
        "--budget",
        metavar="N,N",
        help="thinking budgets: numbers, 0 (answer at once), names of budget.levels, or "
        f"{NONE} (no budget in the input); by default the run's eval.budgets",
    )
    add(
        "--every",
        type=int,
        metavar="N",
        help="also measure the dense curve: one trace with the largest budget, whose answer is "
        "forced at every multiple of N tokens",
    )
    add(
        "--swap",
        action="store_true",
        help="also measure whether the policy uses its budget: one trace per budget as input, with "
        "the largest budget as limit, whose answer is forced at every budget",
    )
    add(
        "--samples",
        type=int,
        default=0,
        metavar="N",
        help="samples per problem; 0 (default) evaluates the greedy answer",
    )
    add(
        "--temperature",
        type=float,
        help=f"temperature of the samples; {TEMPERATURE} by default",
    )
    add("--top-p", type=float, help=f"top-p of the samples; {TOP_P} by default")
    add(
        "--greedy",
        action="store_true",
        help="evaluate the greedy answer in addition to the samples",
    )
    add(
        "--self-consistency",
        type=int,
        metavar="K",
        help="measure maj@K at equal total tokens; draws samples at 1/K of every budget too",
    )


def _add_job_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options for problems, speed, output and comparisons."""
    add = parser.add_argument
    add(
        "--size",
        type=int,
        metavar="N",
        help="evaluate a fixed random subset of N problems per set",
    )
    add(
        "--train",
        type=data_set,
        metavar="NAME:PATH",
        help="training set; accuracy is also measured without its near-duplicates; by default the "
        "run's training set",
    )
    add("--split", choices=("test", "train"), default="test", help="part of the set")
    add(
        "--seed",
        type=int,
        help="seed of subset and samples; by default the run's, or 0 for a model",
    )
    add(
        "--slots",
        type=int,
        default=SLOTS,
        help=f"rows decoded together on all GPUs; {SLOTS} by default",
    )
    add("--name", help="name of the policy in tables; by default the folder's name")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="output folder; by default RUN/evaluation/step-000100 (for step 100), followed by "
        "the options that are not default, or runs/evaluation-NAME-OPTIONS",
    )
    add(
        "--compare",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="evaluated run, or folder of an evaluation, repeatable; differences are paired by "
        "problem",
    )
    add(
        "--free",
        type=Path,
        metavar="DIR",
        help="folder of an evaluation of the policy before training, best with --every; its "
        "accuracy by tokens used is drawn, and the distance from it",
    )
    add(
        "--label-difficulty",
        type=Path,
        metavar="OUT.jsonl",
        help="write each problem's avg@k, for data.groups=solve_rate",
    )


def _faults_of_numbers(arguments: argparse.Namespace) -> Iterator[str]:
    """Yields an error message for each invalid option. Reads no files."""
    data = arguments.data
    samples = arguments.samples
    if arguments.model is not None and not data:
        yield "--data is required with --model; pass a data set such as gsm8k:PATH"
    if arguments.model is not None and not arguments.budgets:
        yield "--budgets is required with --model; pass thinking budgets such as 512,1024"
    if arguments.swap and arguments.every is not None:
        yield (
            f"--swap can't be combined with --every {arguments.every}; pass only one of them, and "
            "run the other evaluation with another --out"
        )
    if len(set(data)) < len(data):
        yield "--data contains a set twice; name each set once"
    for name, (least, most) in _RANGES.items():
        value = getattr(arguments, name)
        if value is None:
            continue
        if value < least:
            yield f"{_option(name)} {shown(value)} is too small; use {least} or more"
        if value > most:
            yield f"{_option(name)} {shown(value)} is too large; use at most {most}"
    for name in ("temperature", "top_p"):
        value = getattr(arguments, name)
        if value is not None and not samples:
            yield (
                f"{_option(name)} {shown(value)} has no effect, because --samples 0 is greedy; "
                f"pass --samples 1 or more, or leave {_option(name)} out"
            )
    votes = arguments.self_consistency
    if votes is not None and samples < votes:
        yield (
            f"--self-consistency {votes} needs at least {votes} samples, but --samples is "
            f"{samples}; pass --samples {votes} or more"
        )


def _option(name: str) -> str:
    """Returns the command-line option for an attribute, such as --top-p for `top_p`."""
    return f"--{name.replace('_', '-')}"


def _faults_of_files(arguments: argparse.Namespace) -> Iterator[str]:
    """Yields an error message for each invalid value of --train and --label-difficulty."""
    if arguments.train == "ledger":
        yield (
            "--train ledger has no effect, because the test problems of the ledger task always "
            "differ from its training problems; leave the option out"
        )
    labels = arguments.label_difficulty
    if labels is None:
        return
    if not arguments.samples:
        yield f"--label-difficulty {labels} needs sampled answers; pass for example --samples 8"
    if not labels.absolute().parent.is_dir():
        yield f"--label-difficulty {labels}: the folder does not exist; create it first"
    if labels.is_dir():
        yield f"--label-difficulty {labels} is a folder; use the name of a file"
    # Test now that the file can be written, because it is written only after hours of
    # evaluation.
    try:
        with tempfile.TemporaryFile(dir=labels.absolute().parent):
            pass
    except OSError as error:
        yield f"--label-difficulty {labels} can't be written ({error.strerror}); use another path"
    if labels.is_file():
        from bacr_jax.questions.groups import read_solve_rates

        try:
            read_solve_rates(labels, ())
        except UserError:
            yield f"--label-difficulty {labels} exists, but contains no labels; use another path"


def _faults_of_overrides(arguments: argparse.Namespace) -> Iterator[str]:
    """Yields an error message for each config key that can't be overridden in this evaluation."""
    yield from override_faults(
        arguments.overrides,
        EVALUATED_KEYS,
        is_run=arguments.model is None,
        reason=DEFINES_POLICY,
    )
    if arguments.url is not None:
        yield from server_faults(arguments.overrides, "--url")


def settle(arguments: argparse.Namespace, trained: Config) -> Config:
    """Returns the config of the evaluation: the policy's config with the options applied.

    Args:
      arguments: parsed command line.
      trained: config with which the policy was trained.

    Raises:
      UserError: if an option or an override can't be used with this policy.
    """
    from bacr_jax.methods.registry import declares_budget

    config = config_io.override(trained, arguments.overrides)
    formats = [
        text
        for text in arguments.overrides
        if "data.prompt_format" in config_io.overridden_keys(text)
    ]
    if formats and declares_budget(resolve(config).method):
        raise UserError(
            f"{formats[0]} can't be used with SelfBudgeter, whose responses begin with a budget "
            "and need a special prompt format; leave the option out"
        )
    budgets, no_budget = _budgets(arguments.budgets, config.budget.levels, config.eval)
    sets = tuple(arguments.data) or config.data.eval
    eval_missing = config.data.eval_missing
    overridden = config_io.is_overridden("data.eval_missing", arguments.overrides)
    if arguments.data and not overridden:
        # Evaluation sets on the command line must exist, even if the run skipped missing
        # sets.
        eval_missing = "refuse"
    # The training set determines the prompt format and the grader. A model has no training set,
    # so the first evaluation set is used.
    train = config.data.train if arguments.run is not None else sets[0]
    config = dataclasses.replace(
        config,
        seed=config.seed if arguments.seed is None else arguments.seed,
        data=dataclasses.replace(config.data, train=train, eval=sets, eval_missing=eval_missing),
        rollout=dataclasses.replace(config.rollout, slots=arguments.slots),
        eval=EvalConfig(
            every=None,
            budgets=budgets,
            no_budget=no_budget,
            cut_every=arguments.every,
            size=arguments.size,
            samples=arguments.samples,
            temperature=TEMPERATURE if arguments.temperature is None else arguments.temperature,
            top_p=TOP_P if arguments.top_p is None else arguments.top_p,
            budget_tag=config.eval.budget_tag,
        ),
    )
    check_ranges(config)
    return config


def _budgets(
    text: str | None, levels: Mapping[str, int], evaluation: EvalConfig
) -> tuple[tuple[int, ...], bool]:
    """Returns the budgets in tokens, and True if the policy is also evaluated without a budget.

    Args:
      text: value of --budgets, or None for the budgets of the config.
      levels: `budget.levels`.
      evaluation: section `eval` of the config.
    """
    if text is None:
        return evaluation.budgets, evaluation.no_budget
    budgets = read_budgets(text, option="--budgets", levels=levels)
    if len(set(budgets)) != len(budgets):
        raise UserError(f"--budgets {text} contains a budget twice; list each budget once")
    numbers = [budget for budget in budgets if budget is not None]
    return tuple(sorted(numbers)), None in budgets


def settings_name(arguments: argparse.Namespace, evaluation: EvalConfig) -> str:
    """Returns the name of the output folder of an evaluation, such as `budgets-8-64-samples-4`.

    The name lists the options that change the samples. It is empty if none of them was set. Data
    set paths, overrides and long names are shortened, and a hash of the full values is appended.

    Args:
      arguments: parsed command line.
      evaluation: section `eval` of the evaluation's config.
    """
    options = list(_named_options(arguments, evaluation))
    parts = []
    for option, value in options:
        parts.append(_slug(value) if option == "data" else f"{option}-{_slug(value)}")
    name = "-".join(parts)
    has_long_values = bool(arguments.data or arguments.overrides)
    if not has_long_values and len(name) <= _MAX_NAME:
        return name
    digest = hashlib.sha256(json.dumps(options).encode()).hexdigest()[:6]
    return f"{name[:_MAX_NAME].rstrip('-')}-{digest}"


def _named_options(
    arguments: argparse.Namespace, evaluation: EvalConfig
) -> Iterator[tuple[str, str]]:
    """Yields the name and the value of each option that was set and that changes the samples."""
    for spec in arguments.data:
        yield "data", spec
    if arguments.budgets is not None:
        budgets = [*map(str, evaluation.budgets), *([NONE] if evaluation.no_budget else [])]
        yield "budgets", ",".join(budgets)
    if arguments.samples:
        yield "samples", str(arguments.samples)
    if arguments.greedy and arguments.samples:
        yield "and", "greedy"
    if arguments.swap:
        yield "with", "swap"
    for name in ("every", "temperature", "top_p", "self_consistency", "size", "seed"):
        value = getattr(arguments, name)
        if value is not None:
            yield name.replace("_", "-"), str(value)
    if arguments.url is not None:
        # The address is not included, because the same evaluation may continue on another server.
        yield "engine", VLLM
    if arguments.split != "test":
        yield "split", arguments.split
    if arguments.slots != SLOTS:
        yield "slots", str(arguments.slots)
    for override in arguments.overrides:
        key, _, value = override.partition("=")
        yield key.strip().rpartition(".")[2].replace("_", "-"), value


def _slug(value: str) -> str:
    """Converts an option's value to text that is safe in the name of a folder.

    For a data set such as `gsm8k:PATH`, only the name is used. For a table such as `jsonl:PATH`,
    only the name of the file is used.
    """
    name, colon, path = value.partition(":")
    if colon:
        value = Path(path).stem if name in TABLES else name
    return re.sub(r"[^A-Za-z0-9.]+", "-", value).strip("-.") or "x"


def _training_set(arguments: argparse.Namespace, data: DataConfig, seed: int) -> tuple[Any, str]:
    """Loads the training questions that are searched for near-duplicates of evaluated questions.

    The questions come from the set in --train, or from the training set of the run by default. See
    `job.training_set` for the returned values.
    """
    from bacr_jax.evaluation.job import training_set
    from bacr_jax.questions.loaders import is_made

    spec = arguments.train
    is_searched = arguments.run is not None and arguments.split != "train"
    if spec is None and is_searched and not is_made(data.train):
        spec = data.train
    return training_set(spec, data, seed, is_optional=arguments.train is None)


def evaluate(
    arguments: argparse.Namespace, poll: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Runs the evaluation of a parsed command line and writes its tables.

    Args:
      arguments: parsed command line.
      poll: function that is called regularly and may raise an exception to stop the evaluation. A
        later call of `evaluate` with the same arguments continues the evaluation. If None, the
        evaluation can't be stopped in this way.

    Returns:
      The content of results.json.

    Raises:
      UserError: if an input is invalid.
    """
    from bacr_jax.evaluation import job
    from bacr_jax.evaluation.folder import (
        default_folder,
        open_evaluation,
        recorded_prompt_date,
    )
    from bacr_jax.parallel import processes
    from bacr_jax.parallel.compile_cache import keep_programs
    from bacr_jax.parallel.host_memory import keep_freed_memory
    from bacr_jax.prompts.prompt_date import with_prompt_date
    from bacr_jax.questions.missing import without_missing
    from bacr_jax.report.chosen_step import step_lines
    from bacr_jax.report.evaluation import write_tables
    from bacr_jax.runs.progress import Progress
    from bacr_jax.runs.saved_policy import open_policy

    saved = open_policy(arguments.run, arguments.model, arguments.step, download=arguments.download)
    saved.check()
    config = settle(arguments, saved.config)
    data, left_out = without_missing(config.data, config.eval)
    folder_name = settings_name(arguments, config.eval)
    out = arguments.out or default_folder(arguments.run, saved.step, arguments.model, folder_name)
    date = saved.style.date if saved.style is not None else ""
    tokenizer_folder = config.model.tokenizer or config.model.path
    data = with_prompt_date(data, tokenizer_folder, recorded=date or recorded_prompt_date(out))
    config = dataclasses.replace(config, data=data)
    processes.check_platform()
    keep_freed_memory()
    saved = saved.under(config)
    compile_cache = keep_programs(config.output.compile_cache)
    train, training_set_line = _training_set(arguments, config.data, config.seed)
    work = job.prepare(
        saved,
        greedy=arguments.greedy or not arguments.samples,
        self_consistency=arguments.self_consistency,
        split=arguments.split,
        train=train,
        compare=arguments.compare,
        settings_name=folder_name,
        labels=arguments.label_difficulty,
        name=arguments.name,
        url=arguments.url,
        swap=arguments.swap,
        free=arguments.free,
    )
    with Progress() as progress, open_evaluation(out, work.settings):
        progress.print_line(f"evaluating {work.name}; everything goes to {out}")
        lines = list(step_lines(saved.chosen)) if saved.chosen is not None else []
        lines.append(compile_cache.line)
        if work.url is None:
            lines.append(job.arithmetic_line(config.model, config.rollout.attention))
        lines += left_out
        if training_set_line:
            lines.append(training_set_line)
        for line in lines:
            progress.print_line(line)
        results = job.run(work, out, progress, poll)
        for table in write_tables(out, results):
            progress.print_line(table)
    return results


@entry_point
def main(argv: Sequence[str] | None) -> int:
    """Runs `bacr evaluate`.

    Returns:
      The exit code: 0 after success, 75 after a signal, 130 after Ctrl-C, and 1 if a device ran out
        of memory. Invalid input exits with code 2.
    """
    silence_orbax()
    arguments = parse(argv)
    # Imported here because it imports JAX, which --help does not need.
    from bacr_jax.parallel.preemption import EXIT_CODE, Preempted, PreemptionHandler

    try:
        with PreemptionHandler() as interruption:
            evaluate(arguments, interruption.poll)
    except Preempted as signal:
        print_message(f"{signal}: stopped; the same command continues")
        return EXIT_CODE
    except OutOfMemory as error:
        # The samples depend on the number of rows that are decoded together (slots), so an
        # evaluation with fewer slots can't continue in the same folder.
        fewer = max(arguments.slots // 2, 1)
        return failure(f"{error}; use --slots {fewer} --out DIR, with a new folder")
    except KeyboardInterrupt:
        print_message("interrupted; the same command continues")
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
