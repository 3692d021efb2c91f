"""`bacr data`: what a set holds, and what a model will read of it.

`--inspect NAME[:PATH]` describes a set before a run relies on it; `--show-prompts N` shows the
prompts of its first questions, or of those that a config trains on; `--prepare DIR` makes the
folder that the shipped configs read.
"""

import argparse
import contextlib
import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.config.checks import BUDGET
from bacr_jax.config.cli import Parser, entry_point
from bacr_jax.config.derived import own_tokens
from bacr_jax.errors import UserError
from bacr_jax.questions.published_sets import PUBLISHED_SETS

if TYPE_CHECKING:
    from bacr_jax.questions.question_set import QuestionSet
    from bacr_jax.questions.source import Split

DESCRIPTION = (
    "Shows rows, answers, levels, groups, prompt lengths and duplicates of a set of questions, and "
    "lists the rows that can't be used. Shows what a model will read of the first questions. Or "
    "makes the folder that the configs read, from the public sources."
)
QUANTILES = (0, 10, 50, 90, 99, 100)
MOST_SHOWN = 1000
_EXAMPLES = 3
_SHOWN_CHARS = 60


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(prog="bacr data", description=DESCRIPTION)
    add = parser.add_argument
    add("--inspect", metavar="NAME[:PATH]", help="the set, as in data.train; a config's by default")
    add(
        "--show-prompts",
        type=int,
        metavar="N",
        help="instead: what the model will read of the first N questions, special tokens included",
    )
    add(
        "--config",
        action="append",
        default=[],
        metavar="FILE",
        help="a run's config, for its set, format and tokenizer; repeatable; later files win",
    )
    add("--against", metavar="NAME[:PATH]", help="training set to look for near-duplicates in")
    add("--split", choices=("train", "test"), help="which part (default: test with --against)")
    add("--tokenizer", metavar="DIR", help="tokenizer folder, for prompt lengths")
    add(
        "--prepare",
        type=Path,
        metavar="DIR",
        help=f"write the sets named after it, all by default, to DIR: {' '.join(PUBLISHED_SETS)}",
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
        help="columns, groups, prompt format ...; with --prepare the names of sets",
    )
    options = parser.parse_intermixed_args(argv)
    if options.prepare is not None:
        for name in ("inspect", "show_prompts", "config", "against", "split", "tokenizer"):
            if getattr(options, name) not in (None, []):
                raise UserError(f"--prepare: reads no --{name.replace('_', '-')}; leave it out")
        return options
    if options.show_prompts is not None and options.against is not None:
        raise UserError("--against: is not read with --show-prompts; leave it out")
    if options.origin is not None:
        raise UserError("--from: says where --prepare finds the sets; write --prepare DIR")
    if options.inspect is None and not options.config:
        raise UserError("command line: no set; write --inspect NAME:PATH, or --config FILE")
    if options.show_prompts is not None and not 1 <= options.show_prompts <= MOST_SHOWN:
        raise UserError(f"--show-prompts {options.show_prompts}: write 1 to {MOST_SHOWN}")
    return options


def report(
    questions: "QuestionSet", config: Config, *, against: "QuestionSet | None", tokenizer: Any
) -> Iterator[str]:
    """Lines that describe a set; `against`: training set to look for near-duplicates in.

    Without a tokenizer the prompts' lengths are left out.
    """
    import numpy as np

    from bacr_jax.questions.splits import THRESHOLD, mark_duplicates, repeated

    if against is not None:
        questions = mark_duplicates(questions, against)
    yield from questions.summary()
    for row in questions.left_out:
        yield f"    {row.id}: {row.reason}"
    yield f"answers: {_kinds(questions.answers)}"
    levels = Counter(questions.levels.tolist())
    yield "levels: " + ", ".join(
        f"{level or 'none'}: {levels[level]:,}" for level in sorted(levels, key=lambda x: x or 9)
    )
    sizes = np.bincount(questions.groups, minlength=config.data.num_groups)
    yield f"groups (data.groups={config.data.groups}): " + ", ".join(
        f"{group}: {size:,}" for group, size in enumerate(sizes)
    )
    subjects = Counter(subject or "none" for subject in questions.subjects)
    yield "subjects: " + ", ".join(f"{name}: {n:,}" for name, n in subjects.most_common())
    if tokenizer is None:
        yield "prompt tokens: not measured; give --tokenizer DIR"
    else:
        yield _lengths(questions, config, tokenizer)
    yield f"repeated questions in the set: {repeated(questions.questions):,}"
    if against is None:
        yield "near-duplicates of training questions: not looked for; give --against NAME:PATH"
    else:
        near = int(questions.duplicates.sum())
        yield (
            f"near-duplicates of {against.name} (resemblance {THRESHOLD} or more): {near:,} of "
            f"{len(questions):,}, {len(questions) - near:,} without them"
        )


def _kinds(answers: Sequence[str]) -> str:
    """Forms of the gold answers, with examples."""
    from bacr_grading import parse_reference

    forms: dict[str, list[str]] = {}
    for answer in answers:
        gold = parse_reference(answer)
        forms.setdefault("other" if gold is None else gold.kind, []).append(answer)
    parts = []
    for kind, found in sorted(forms.items(), key=lambda item: -len(item[1])):
        shown = [
            " ".join(text.split())[:_SHOWN_CHARS] for text in dict.fromkeys(found[: 4 * _EXAMPLES])
        ]
        parts.append(f"{kind} {len(found):,} ({'; '.join(shown[:_EXAMPLES])})")
    return ", ".join(parts)


def _lengths(questions: "QuestionSet", config: Config, tokenizer: Any) -> str:
    """Quantiles of the prompts' lengths; UserError if every prompt is over the limit."""
    # Most of these import JAX, which nothing else here needs.
    import numpy as np

    from bacr_jax.methods.registry import declares_budget
    from bacr_jax.prompts.encoding import encode_prompts
    from bacr_jax.prompts.formats import format_for
    from bacr_jax.prompts.show_prompts import prompt_ids
    from bacr_jax.prompts.told import budget_words, largest_told

    style = format_for(config, declares_budget=declares_budget(config))
    texts, words, name = questions.questions, budget_words(config, style), style.name
    if words:
        name += f", {words.replace(BUDGET, str(largest_told(config)))!r}"
    lengths = np.array([len(ids) for ids in prompt_ids(config, style, words, texts, tokenizer)])
    quantiles = np.percentile(lengths, QUANTILES, method="higher")
    limit = config.data.max_prompt_tokens
    if lengths.min() > limit:
        encode_prompts(tokenizer, texts, style, max_tokens=limit)  # refuses them
    shown = ", ".join(f"{q} %: {int(n):,}" for q, n in zip(QUANTILES, quantiles, strict=True))
    over = int((lengths > limit).sum())
    return f"prompt tokens ({name}): {shown}; over data.max_prompt_tokens={limit}: {over:,}"


def _tokenizer(options: argparse.Namespace, config: Config) -> Any:
    """The set's own, or that of --tokenizer, or of the folder that --config names; None: none."""
    from bacr_jax.model.hf.hub import local_folder
    from bacr_jax.prompts.tokenizers import load_tokenizer
    from bacr_jax.questions.loaders import own_tokenizer

    own, folder = own_tokenizer(config.data), options.tokenizer
    if own is not None and folder:
        raise UserError(
            f"--tokenizer {folder}: these questions have tokens of their own; leave it out"
        )
    named = config.model.tokenizer or config.model.path
    if folder is None and options.config and named:
        here = Path(named).is_dir()
        # A model that is not there yet: prompts are shown without its tokenizer.
        with contextlib.suppress(UserError):
            folder = named if here else local_folder(named, download=False, where="model.path")
    return load_tokenizer(folder, where="--tokenizer") if own is None and folder else own


def _config(options: argparse.Namespace) -> Config:
    """The config of a run on this set, checked, so that its format and groups follow from it."""
    config = config_io.load(options.config, options.overrides)
    spec = options.inspect
    if spec is not None:
        data = dataclasses.replace(config.data, train=options.against or spec, eval=(spec,))
        config = dataclasses.replace(config, data=data)
        if own_tokens(data) is None:
            folder = options.tokenizer or config.model.tokenizer or config.model.path
            model = dataclasses.replace(config.model, tokenizer=folder or "none")
            config = dataclasses.replace(config, model=model)
    config_io.check(config)
    return config


def inspect(options: argparse.Namespace) -> Iterator[str]:
    """The lines of the command."""
    from bacr_jax.questions.groups import check_levels
    from bacr_jax.questions.loaders import load_questions
    from bacr_jax.questions.missing import lines_about_missing

    config = _config(options)
    split: Split = options.split or ("test" if options.against else "train")
    spec = options.inspect or config.data.train
    questions = load_questions(spec, config.data, config.seed, split)
    against = None
    if options.against:
        against = load_questions(options.against, config.data, config.seed, "train")
    tokenizer = _tokenizer(options, config)
    if options.show_prompts is not None:
        from bacr_jax.methods.registry import declares_budget
        from bacr_jax.prompts.formats import format_for
        from bacr_jax.prompts.show_prompts import shown_prompts

        style = format_for(config, declares_budget=declares_budget(config))
        yield from shown_prompts(config, style, questions, tokenizer, count=options.show_prompts)
        return
    yield from report(questions, config, against=against, tokenizer=tokenizer)
    if options.inspect is None:
        yield from lines_about_missing(config)
    if split == "train":
        check_levels(questions.levels, config.data)


@entry_point
def main(argv: Sequence[str] | None) -> None:
    """Entry point: 0, or 2 with one line on stderr when the input can't be used."""
    options = parse(argv)
    lines = inspect(options)
    if options.prepare is not None:
        from bacr_jax.questions.prepare import prepare

        lines = prepare(options.prepare, options.overrides, options.origin)
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
