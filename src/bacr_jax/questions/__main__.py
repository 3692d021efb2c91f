"""Implements `bacr data`, which inspects and prepares sets of questions.

`--inspect NAME[:PATH]` describes a set. `--show-prompts N` shows the prompts of the first questions
of this set or of a config's training set. `--prepare DIR` writes the folder that the shipped
configs read.
"""

import argparse
import contextlib
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bacr_jax.config import Config, DataConfig, ModelConfig
from bacr_jax.config import io as config_io
from bacr_jax.config.checks import BUDGET
from bacr_jax.config.cli import Parser, data_set, entry_point
from bacr_jax.config.derived import builtin_vocab
from bacr_jax.config.settings import Settings, resolve
from bacr_jax.config.shipped import check_overlays
from bacr_jax.errors import UserError
from bacr_jax.questions.published_sets import PUBLISHED_SETS

if TYPE_CHECKING:
    from bacr_jax.questions.question_set import QuestionSet
    from bacr_jax.questions.source import Split

DESCRIPTION = (
    "Shows rows, answers, levels, groups, prompt lengths and duplicates of a set of questions, and "
    "lists the rows that can't be used. With --show-prompts, shows the prompts of the first "
    "questions instead. With --prepare, writes the folder that the configs read, from the public "
    "sources."
)
# Quantiles of prompt lengths to print, in percent.
QUANTILES = (0, 10, 50, 90, 99, 100)
# Maximum number of prompts that --show-prompts prints.
MOST_SHOWN = 1000
# Number of example answers per kind of answer, and maximum number of characters of an example.
_EXAMPLES = 3
_EXAMPLE_CHARS = 60


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line and checks that its options can be combined."""
    parser = Parser(prog="bacr data", description=DESCRIPTION)
    add = parser.add_argument
    add(
        "--inspect",
        type=data_set,
        metavar="NAME[:PATH]",
        help="the set, as in data.train; default: data.train of the config",
    )
    add(
        "--show-prompts",
        type=int,
        metavar="N",
        help="show only the prompts of the first N questions, with special tokens",
    )
    add(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="config of a run, for its set, format and tokenizer; repeatable, later files override "
        "earlier ones",
    )
    add(
        "--against",
        type=data_set,
        metavar="NAME[:PATH]",
        help="training set to look for near-duplicates in",
    )
    add(
        "--split",
        choices=("train", "test"),
        help="which part of the set (default: test with --against, else train)",
    )
    add("--tokenizer", type=Path, metavar="DIR", help="tokenizer folder, for prompt lengths")
    add(
        "--prepare",
        type=Path,
        metavar="DIR",
        help=f"write the sets named after DIR, by default all, to DIR: {' '.join(PUBLISHED_SETS)}",
    )
    add(
        "--from",
        dest="origin",
        type=Path,
        metavar="PATH",
        help="for --prepare: a folder or an archive with copies of the sets, instead of the hub",
    )
    add(
        "overrides",
        nargs="*",
        metavar="data.key=value",
        help="config keys such as columns, groups and prompt format; with --prepare, names of sets",
    )
    options = parser.parse_intermixed_args(argv)
    _check_options(options)
    return options


def _check_options(options: argparse.Namespace) -> None:
    if options.prepare is not None:
        for name in ("inspect", "show_prompts", "config", "against", "split", "tokenizer"):
            if getattr(options, name) not in (None, []):
                option = name.replace("_", "-")
                raise UserError(f"--{option} has no effect with --prepare; leave it out")
        return
    if options.show_prompts is not None and options.against is not None:
        raise UserError("--against has no effect with --show-prompts; leave it out")
    if options.origin is not None:
        raise UserError("--from has no effect without --prepare; pass --prepare DIR too")
    if options.inspect is None and not options.config:
        raise UserError(
            "command line: no data set is given; pass --inspect NAME:PATH to show one data set, "
            "or --config FILE to show the training set of a config"
        )
    if options.show_prompts is not None and not 1 <= options.show_prompts <= MOST_SHOWN:
        raise UserError(
            f"--show-prompts {options.show_prompts} is out of range; use 1 to {MOST_SHOWN}"
        )


def report(
    questions: "QuestionSet", settings: Settings, *, against: "QuestionSet | None", tokenizer: Any
) -> Iterator[str]:
    """Yields lines that describe a question set.

    Args:
      settings: settings of a run on this set, which determine its groups and prompts.
      against: training set to search for near-duplicates of the questions, or None.
      tokenizer: tokenizer for the lengths of prompts, or None to omit the lengths.
    """
    import numpy as np

    from bacr_jax.questions.groups import NO_GROUP
    from bacr_jax.questions.splits import THRESHOLD, mark_duplicates, repeated

    data = settings.task.data
    if against is not None:
        questions = mark_duplicates(questions, against)
    yield from questions.summary()
    for row in questions.left_out:
        yield f"    {row.id}: {row.reason}"
    yield f"answers: {_answer_kinds(questions.answers)}"
    level_counts = Counter(questions.levels.tolist())
    # Level 0 means that the level is unknown. It is listed last.
    levels = sorted(level for level in level_counts if level) + [0]
    level_texts = [
        f"{level or 'none'}: {level_counts[level]:,}" for level in levels if level in level_counts
    ]
    yield f"levels: {', '.join(level_texts)}"
    labeled = questions.groups[questions.groups != NO_GROUP]
    group_sizes = np.bincount(labeled, minlength=data.num_groups)
    group_texts = [f"{group}: {size:,}" for group, size in enumerate(group_sizes)]
    num_unlabeled = len(questions) - len(labeled)
    if num_unlabeled:
        group_texts.append(f"without a label: {num_unlabeled:,}")
    yield f"groups (data.groups={data.groups}): {', '.join(group_texts)}"
    subject_counts = Counter(subject or "none" for subject in questions.subjects)
    subject_texts = [f"{subject}: {count:,}" for subject, count in subject_counts.most_common()]
    yield f"subjects: {', '.join(subject_texts)}"
    if tokenizer is None:
        yield "prompt tokens: not measured; pass --tokenizer DIR to measure them"
    else:
        yield _lengths(questions, settings, tokenizer)
    yield f"repeated questions in the set: {repeated(questions.questions):,}"
    if against is None:
        yield (
            "near-duplicates of training questions: not searched; pass --against NAME:PATH to "
            "search them"
        )
    else:
        num_near = int(questions.duplicates.sum())
        num_others = len(questions) - num_near
        yield (
            f"near-duplicates of {against.name} (resemblance {THRESHOLD} or more): {num_near:,} of "
            f"{len(questions):,}, {num_others:,} without them"
        )


def _answer_kinds(answers: Sequence[str]) -> str:
    """Returns a text with the kinds of the gold answers, most frequent first, with examples."""
    from bacr_grading import parse_reference

    answers_by_kind: dict[str, list[str]] = {}
    for answer in answers:
        gold = parse_reference(answer)
        kind = "other" if gold is None else gold.kind
        answers_by_kind.setdefault(kind, []).append(answer)
    kinds = sorted(answers_by_kind, key=lambda kind: len(answers_by_kind[kind]), reverse=True)
    parts = []
    for kind in kinds:
        kind_answers = answers_by_kind[kind]
        # Take more answers than are shown, because some of them can be equal.
        distinct = list(dict.fromkeys(kind_answers[: 4 * _EXAMPLES]))
        examples = [" ".join(text.split())[:_EXAMPLE_CHARS] for text in distinct[:_EXAMPLES]]
        parts.append(f"{kind} {len(kind_answers):,} ({'; '.join(examples)})")
    return ", ".join(parts)


def _lengths(questions: "QuestionSet", settings: Settings, tokenizer: Any) -> str:
    """Returns a text with quantiles of the prompt lengths in tokens.

    Raises:
      UserError: every prompt is longer than data.max_prompt_tokens.
    """
    # Imported here because most of these import JAX, which other parts of this command don't need.
    import numpy as np

    from bacr_jax.methods.registry import declares_budget
    from bacr_jax.prompts.budget_prompt import budget_words
    from bacr_jax.prompts.encoding import encode_prompts
    from bacr_jax.prompts.formats import format_for
    from bacr_jax.prompts.show_prompts import prompt_ids

    task = settings.task
    style = format_for(task.data, declares_budget=declares_budget(settings.method))
    texts = questions.questions
    words = budget_words(task.budget_text, style)
    name = style.name
    if words:
        name += f", {words.replace(BUDGET, str(task.largest_budget))!r}"
    prompts = prompt_ids(style, words, task.largest_budget, texts, tokenizer)
    lengths = np.array([len(ids) for ids in prompts])
    limit = task.data.max_prompt_tokens
    if lengths.min() > limit:
        # Call the function that runs use, so that the command reports the same error.
        encode_prompts(tokenizer, texts, style, max_tokens=limit)
    quantiles = np.percentile(lengths, QUANTILES, method="higher")
    quantile_texts = [
        f"{percent} %: {int(length):,}"
        for percent, length in zip(QUANTILES, quantiles, strict=True)
    ]
    num_over = int((lengths > limit).sum())
    return (
        f"prompt tokens ({name}): {', '.join(quantile_texts)}; over "
        f"data.max_prompt_tokens={limit}: {num_over:,}"
    )


def _tokenizer(options: argparse.Namespace, data: DataConfig, model: ModelConfig) -> Any:
    """Returns the tokenizer of the prompts, or None if no tokenizer is available.

    The result is the built-in tokenizer of the set, else the tokenizer in --tokenizer, else the
    tokenizer of the model in --config.
    """
    from bacr_jax.model.hf.hub import local_folder
    from bacr_jax.prompts.tokenizers import load_tokenizer
    from bacr_jax.questions.loaders import own_tokenizer

    set_tokenizer = own_tokenizer(data)
    folder = options.tokenizer and str(options.tokenizer)
    if set_tokenizer is not None:
        if folder:
            raise UserError(
                f"--tokenizer {folder} has no effect, because the questions of this set have a "
                "built-in character tokenizer; leave the option out"
            )
        return set_tokenizer
    model_folder = model.tokenizer or model.path
    if folder is None and options.config and model_folder:
        if Path(model_folder).is_dir():
            folder = model_folder
        else:
            # Prompts can be shown without a tokenizer if the model is not downloaded yet.
            with contextlib.suppress(UserError):
                folder = local_folder(model_folder, download=False, where="model.path")
    return load_tokenizer(folder, where="--tokenizer") if folder else None


def _config(options: argparse.Namespace) -> Config:
    """Returns the validated config of a run on the inspected set."""
    if options.config:
        check_overlays(options.config)
    config = config_io.load(options.config, options.overrides)
    spec = options.inspect
    if spec is not None:
        data = dataclasses.replace(config.data, train=options.against or spec, eval=(spec,))
        config = dataclasses.replace(config, data=data)
        if builtin_vocab(data) is None:
            typed_folder = options.tokenizer and str(options.tokenizer)
            folder = typed_folder or config.model.tokenizer or config.model.path
            model = dataclasses.replace(config.model, tokenizer=folder or "none")
            config = dataclasses.replace(config, model=model)
    config_io.check(config)
    return config


def inspect(options: argparse.Namespace) -> Iterator[str]:
    """Yields the output lines of the command, for all options except --prepare."""
    from bacr_jax.questions.groups import NO_GROUP, check_levels
    from bacr_jax.questions.loaders import load_questions
    from bacr_jax.questions.missing import missing_set_lines
    from bacr_jax.questions.source import check_labeled

    config = _config(options)
    split: Split = options.split or ("test" if options.against else "train")
    spec = options.inspect or config.data.train
    questions = load_questions(spec, config.data, config.seed, split)
    against = None
    if options.against:
        against = load_questions(options.against, config.data, config.seed, "train")
    tokenizer = _tokenizer(options, config.data, config.model)
    if options.show_prompts is not None:
        from bacr_jax.methods.registry import declares_budget
        from bacr_jax.prompts.formats import format_for
        from bacr_jax.prompts.show_prompts import shown_prompts

        style = format_for(config.data, declares_budget=declares_budget(resolve(config).method))
        task = resolve(config).task
        yield from shown_prompts(task, style, questions, tokenizer, count=options.show_prompts)
        return
    yield from report(questions, resolve(config), against=against, tokenizer=tokenizer)
    if options.inspect is None:
        yield from missing_set_lines(config.data, config.eval)
    if split == "train":
        check_levels(questions.levels, config.data)
        # Questions with long prompts have no labels, but without a tokenizer they are unknown here.
        if (questions.groups == NO_GROUP).all():
            check_labeled(questions, config.data)


@entry_point
def main(argv: Sequence[str] | None) -> None:
    """Runs the command. For invalid input, prints one line to stderr and returns exit code 2."""
    options = parse(argv)
    lines = inspect(options)
    if options.prepare is not None:
        from bacr_jax.questions.prepare import prepare

        lines = prepare(options.prepare, options.overrides, options.origin)
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
