"""`bacr evaluate --run DIR | --model HFDIR`: accuracy by thinking budget."""

import argparse
import dataclasses
import difflib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bacr_jax.config import Config, EvalConfig
from bacr_jax.config import io as config_io
from bacr_jax.config.checks import check_ranges
from bacr_jax.config.cli import (
    Parser,
    add_saved_policy,
    check_saved_policy,
    entry_point,
    failure,
    quieten_orbax,
)
from bacr_jax.config.derived import NONE, read_budgets
from bacr_jax.config.engine import add_engine, engine_faults
from bacr_jax.config.values import shown
from bacr_jax.errors import UserError
from bacr_jax.oom import OutOfMemory

if TYPE_CHECKING:
    from bacr_jax.questions.question_set import QuestionSet

DESCRIPTION = (
    "Measures a policy at several thinking budgets: accuracy with 95 % intervals, pass@k, maj@k, "
    "anytime accuracy and tokens, as table, JSON, Markdown, LaTeX and pictures. The same command "
    "continues an evaluation that was interrupted."
)
EPILOG = (
    "Keys that say how questions are read and answered can be overridden, such as "
    "data.question_column=problem or rollout.answer_tokens=256, and keys of speed, such as "
    "model.product_dtype=bfloat16 (docs/evaluation.md); with --model also "
    "conditioning.told=words, which tells the budget in the prompt."
)
# What may be overridden: the policy stays as it was trained.
OVERRIDABLE = (
    "budget.cap",
    "budget.grace",
    "budget.levels",
    "data.",
    "eval.budget_tag",
    "grader",
    "grading.",
    "mesh.decode_tensor",
    "model.attention",
    "model.compute_dtype",
    "model.path",
    "model.product_dtype",
    "model.tokenizer",
    "output.compile_cache",
    "rollout.answer_tokens",
    "rollout.attention",
    "rollout.chunk",
    "rollout.refill",
    "rollout.windows",
)
# How the budget is told, which nobody but the command says of an untouched model.
TOLD = ("conditioning.told", "conditioning.words")
TEMPERATURE, TOP_P, SLOTS = 0.6, 0.95, 64
# Options that are whole numbers: least and most.
_RANGES = {
    "samples": (0, 100_000),
    "size": (1, 2**31 - 1),
    "slots": (1, 1_000_000),
    "every": (1, 2**31 - 1),
    "self_consistency": (2, 100_000),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, its numbers checked."""
    parser = Parser(prog="bacr evaluate", description=DESCRIPTION, epilog=EPILOG)
    add = parser.add_argument
    add_saved_policy(parser)
    _add_asked(parser)
    add("--size", type=int, metavar="N", help="a fixed random subset of N problems per set")
    add(
        "--train",
        metavar="NAME:PATH",
        help="training set: also gives the accuracy without its near-duplicates; a run's own by "
        "default",
    )
    add("--split", choices=("test", "train"), default="test", help="part of the set")
    add("--seed", type=int, help="of subset and samples; a run's own by default, else 0")
    add(
        "--slots",
        type=int,
        default=SLOTS,
        help=f"rows decoded together, of all GPUs; {SLOTS} by default",
    )
    add("--name", help="what tables call the policy; by default the folder's name")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="RUN/evaluation/step-000100 (of step 100) or runs/evaluation-NAME",
    )
    add(
        "--compare",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="evaluated run, or folder of an evaluation; repeatable; the difference is paired",
    )
    add(
        "--label-difficulty",
        type=Path,
        metavar="OUT.jsonl",
        help="write each problem's avg@k, for data.groups=solve_rate",
    )
    add_engine(parser)
    add("overrides", nargs="*", metavar="key.sub=value")
    arguments = parser.parse_intermixed_args(argv)
    check_saved_policy(arguments)
    for faults in (_faults_of_numbers, engine_faults, _faults_of_files, _faults_of_overrides):
        for fault in faults(arguments):
            raise UserError(fault)
    return arguments


def _add_asked(parser: argparse.ArgumentParser) -> None:
    """Arguments that say what is asked: sets, budgets, and how answers are drawn."""
    add = parser.add_argument
    add(
        "--data",
        action="append",
        default=[],
        metavar="NAME[:PATH]",
        help="set, repeatable; a run's own data.eval by default",
    )
    add(
        "--budgets",
        metavar="N,N",
        help="thinking budgets: numbers, 0 (answer at once), the names of budget.levels, or "
        f"{NONE} (the policy is told none); a run's own eval.budgets by default",
    )
    add(
        "--every",
        type=int,
        metavar="N",
        help="also the dense curve: one trace told the largest budget, its answer forced at every "
        "multiple of N tokens",
    )
    add("--samples", type=int, default=0, metavar="N", help="per problem; 0, the default: greedy")
    add("--temperature", type=float, help=f"of the samples; {TEMPERATURE} by default")
    add("--top-p", type=float, help=f"nucleus of the samples; {TOP_P} by default")
    add("--greedy", action="store_true", help="the greedy answer too, beside the samples")
    add(
        "--self-consistency",
        type=int,
        metavar="K",
        help="maj@K at equal total tokens: also draws samples at 1/K of every budget",
    )


def _faults_of_numbers(a: argparse.Namespace) -> Iterator[str]:
    """What can be said against the options without looking at any file."""
    if a.model is not None and not a.data:
        yield "--data: none given; write a set such as gsm8k:PATH"
    if a.model is not None and not a.budgets:
        yield "--budgets: none given; write 512,1024"
    if len(set(a.data)) < len(a.data):
        yield "--data: holds a set twice; write each once"
    option = lambda name: f"--{name.replace('_', '-')} {shown(getattr(a, name))}"
    for name, (least, most) in _RANGES.items():
        if getattr(a, name) is not None and getattr(a, name) < least:
            yield f"{option(name)}: write {least} or more"
        if getattr(a, name) is not None and getattr(a, name) > most:
            yield f"{option(name)}: write at most {most}"
    for name in ("temperature", "top_p"):
        if getattr(a, name) is not None and not a.samples:
            yield (
                f"{option(name)}: is not read, since --samples 0 is greedy; write --samples 1 or "
                f"more, or leave {option(name).split()[0]} out"
            )
    if a.self_consistency is not None and a.samples < a.self_consistency:
        yield (
            f"{option('self_consistency')}: needs as many samples, found --samples {a.samples}; "
            f"write --samples {a.self_consistency} or more"
        )


def _faults_of_files(a: argparse.Namespace) -> Iterator[str]:
    if a.train == "ledger":
        yield (
            "--train ledger: its test problems are made to differ from its training problems; "
            "leave it out"
        )
    labels = a.label_difficulty
    if labels is None:
        return
    if not a.samples:
        yield f"--label-difficulty {labels}: avg@k needs samples; write --samples 8"
    if not labels.absolute().parent.is_dir():
        yield f"--label-difficulty {labels}: its folder does not exist; make it first"
    if labels.is_dir():
        yield f"--label-difficulty {labels}: is a folder; write the name of a file"
    # The file is written at the end of hours of work: whether it can be is asked at their start.
    try:
        with tempfile.TemporaryFile(dir=labels.absolute().parent):
            pass
    except OSError as error:
        yield f"--label-difficulty {labels}: can't be written ({error.strerror}); write another"
    if labels.is_file():
        from bacr_jax.questions.groups import read_solve_rates

        try:
            read_solve_rates(labels, ())
        except UserError:
            yield f"--label-difficulty {labels}: holds something else than labels; write another"


def _faults_of_overrides(a: argparse.Namespace) -> Iterator[str]:
    for text in a.overrides:
        key = text.partition("=")[0]
        if a.model is not None and (key in TOLD or key == "method" and _opens_with_budget(text)):
            # A folder does not say that its policy does, or was exported by somebody else.
            continue
        if not key.startswith(OVERRIDABLE) and key in config_io.schema():
            near = difflib.get_close_matches(key, OVERRIDABLE, n=1, cutoff=0.0)
            yield (
                f"{key}: an evaluation leaves the policy as it is; only keys such as "
                f"{near[0]} can be overridden"
            )


def _opens_with_budget(override: str) -> bool:
    """Whether responses under the method that an override names open with a budget."""
    from bacr_jax.methods.registry import declares_budget

    return declares_budget(config_io.override(Config(), [override]))


def settle(arguments: argparse.Namespace, trained: Config) -> Config:
    """The config of the evaluation: how the policy was trained, with the options over it."""
    from bacr_jax.methods.registry import declares_budget

    config = config_io.override(trained, arguments.overrides)
    formats = [text for text in arguments.overrides if text.startswith("data.prompt_format=")]
    if formats and declares_budget(config):
        raise UserError(
            f"{formats[0]}: SelfBudgeter's responses open with a budget, which needs its own "
            "format; leave it out"
        )
    budgets, no_budget = config.eval.budgets, config.eval.no_budget
    if (text := arguments.budgets) is not None:
        told = read_budgets(text, option="--budgets", levels=config.budget.levels)
        if len(set(told)) != len(told):
            raise UserError(f"--budgets {text}: holds a budget twice; write each once")
        budgets, no_budget = tuple(sorted(b for b in told if b is not None)), None in told
    sets = tuple(arguments.data) or config.data.eval
    asked = any(text.startswith("data.eval_missing=") for text in arguments.overrides)
    # A set that somebody names is wanted, whatever the run did without.
    missing = config.data.eval_missing if asked or not arguments.data else "refuse"
    # What is trained on chooses prompt format and grader; a bare model takes them from the set.
    train = config.data.train if arguments.run is not None else sets[0]
    config = dataclasses.replace(
        config,
        seed=config.seed if arguments.seed is None else arguments.seed,
        data=dataclasses.replace(config.data, train=train, eval=sets, eval_missing=missing),
        rollout=dataclasses.replace(config.rollout, slots=arguments.slots),
        eval=EvalConfig(
            every=None,
            budgets=budgets,
            no_budget=no_budget,
            dense=arguments.every,
            size=arguments.size,
            samples=arguments.samples,
            temperature=TEMPERATURE if arguments.temperature is None else arguments.temperature,
            top_p=TOP_P if arguments.top_p is None else arguments.top_p,
            budget_tag=config.eval.budget_tag,
        ),
    )
    check_ranges(config)
    return config


def training_set(arguments: argparse.Namespace, config: Config) -> "tuple[QuestionSet | None, str]":
    """Where near-duplicates are looked for, if anywhere (docs/evaluation.md).

    And a line to be said where the run's own can't be read, no reason to evaluate nothing.
    """
    from bacr_jax.prompts.environment import load_training_texts
    from bacr_jax.questions.loaders import is_made

    if arguments.train is not None:
        return load_training_texts(arguments.train, config), ""
    own = config.data.train
    if arguments.run is None or is_made(own) or arguments.split == "train":
        return None, ""
    try:
        return load_training_texts(own, config), ""
    except UserError as error:
        return None, f"near-duplicates of training questions were not looked for: {error}"


def evaluate(
    arguments: argparse.Namespace, poll: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Everything that the command line asks for; returns what results.json holds.

    Args:
      poll: called regularly; raises to leave, after which the same arguments continue.
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
    from bacr_jax.runs.open import open_policy
    from bacr_jax.runs.progress import Progress

    saved = open_policy(arguments.run, arguments.model, arguments.step, download=arguments.download)
    saved.check()
    config, left_out = without_missing(settle(arguments, saved.config))
    out = arguments.out or default_folder(arguments.run, saved.step, arguments.model)
    date = saved.style.date if saved.style is not None else ""
    config = with_prompt_date(config, recorded=date or recorded_prompt_date(out))
    processes.check_platform()
    keep_freed_memory()
    saved, kept = saved.under(config), keep_programs(config.output.compile_cache)
    train, missing = training_set(arguments, config)
    work = job.prepare(
        saved,
        greedy=arguments.greedy or not arguments.samples,
        self_consistency=arguments.self_consistency,
        split=arguments.split,
        train=train,
        compare=arguments.compare,
        labels=arguments.label_difficulty,
        name=arguments.name,
        url=arguments.url,
    )
    with Progress() as progress, open_evaluation(out, work.settings):
        progress.say(f"evaluating {work.name}; everything goes to {out}")
        used = () if work.url is not None else (job.arithmetic_line(config),)
        taken = step_lines(saved.chosen) if saved.chosen is not None else ()
        for line in (*taken, kept.line, *used, *left_out, *filter(None, [missing])):
            progress.say(line)
        results = job.run(work, out, progress, poll)
        for table in write_tables(out, results):
            progress.say(table)
    return results


@entry_point
def main(argv: Sequence[str] | None) -> int:
    """Entry point: 0 when evaluated, 2 when the input can't be used, 75 when a signal came."""
    quieten_orbax()
    arguments = parse(argv)
    # Imports JAX, which --help does not need.
    from bacr_jax.parallel.preemption import EXIT_CODE, Preempted, PreemptionHandler

    try:
        with PreemptionHandler() as interruption:
            evaluate(arguments, interruption.poll)
    except Preempted as signal:
        print(f"{signal}: stopped; the same command continues", file=sys.stderr)
        return EXIT_CODE
    except OutOfMemory as error:
        # Slots are part of what the samples depend on, so that the folder is another one.
        fewer = max(arguments.slots // 2, 1)
        return failure(f"{error}; write --slots {fewer} --out DIR, a new folder")
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
