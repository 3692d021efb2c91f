"""`python -m bacr_jax.generate --run DIR | --model HFDIR --budget 512 "question"`: asks once."""

import argparse
import dataclasses
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from bacr_jax.config import EvalConfig
from bacr_jax.config import io as config_io
from bacr_jax.config.checks import check_ranges
from bacr_jax.config.cli import (
    Parser,
    add_saved_policy,
    check_saved_policy,
    entry_point,
    failure,
    whole_number,
)
from bacr_jax.config.methods import SELF_BUDGETER
from bacr_jax.config.values import shown
from bacr_jax.errors import UserError
from bacr_jax.oom import OutOfMemory

DESCRIPTION = (
    "Asks a policy one question under one or several thinking budgets. With one budget the "
    "thinking is written while it is decoded; with several they are decoded side by side."
)
EPILOG = (
    "Settings can be overridden, such as rollout.answer_tokens=256 or data.prompt_format=boxed."
)
# A budget that the policy is not told; it then thinks up to budget.max tokens.
NONE = "none"
# Lengths are 32-bit numbers on the device.
LARGEST_BUDGET = 2**31 - 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, its numbers checked."""
    parser = Parser(prog="python -m bacr_jax.generate", description=DESCRIPTION, epilog=EPILOG)
    add = parser.add_argument
    add_saved_policy(parser)
    add(
        "--budget",
        metavar="N,N",
        required=True,
        help=f"thinking tokens, one number or several; {NONE}: the policy is told none",
    )
    add("--temperature", type=float, default=0.0, help="0, the default: the most likely tokens")
    add("--top-p", type=float, default=1.0, help="nucleus of a sampled answer")
    add("--seed", type=int, default=0, help="of a sampled answer")
    add("question")
    add("overrides", nargs="*", metavar="key.sub=value")
    a = parser.parse_intermixed_args(argv)

    def refuse(wrong: bool, line: str) -> None:
        if wrong:
            raise UserError(line)

    check_saved_policy(a)
    refuse(not a.question.strip(), "question: found an empty text; write a question")
    refuse(
        not 0 <= a.temperature < float("inf"),
        f"--temperature {a.temperature}: write 0 (the most likely tokens) or a number above",
    )
    refuse(not 0 < a.top_p <= 1, f"--top-p {a.top_p}: write a number above 0, up to 1")
    refuse(
        a.top_p < 1 and a.temperature == 0,
        f"--top-p {a.top_p}: is not read, since --temperature 0 takes the most likely token; write "
        "--temperature 0.6, or leave --top-p out",
    )
    refuse(not 0 <= a.seed < 2**32, f"--seed {a.seed}: write a number from 0 to 4294967295")
    a.budgets = [_budget(a.budget, word.strip()) for word in a.budget.split(",")]
    return a


def _budget(text: str, word: str) -> int | None:
    if word == NONE:
        return None
    found = whole_number(word, most=LARGEST_BUDGET)
    if found is None:
        raise UserError(
            f"--budget {shown(text, quote=False)}: found {shown(word)}; write whole numbers such "
            f"as 512,1024, or {NONE}"
        )
    return found


def ask(arguments: argparse.Namespace, say: Callable[[str], Any]) -> None:
    """Decodes and writes the answers.

    Args:
      arguments: from `parse`.
      say: writes text, without a line end of its own.

    Raises:
      UserError: the policy, the question or a budget can't be used.
    """
    from bacr_jax.runs.open import load_tokenizer, open_model, open_run

    saved = (
        open_model(arguments.model)
        if arguments.run is None
        else open_run(arguments.run, arguments.step)
    )
    config = config_io.override(saved.config, arguments.overrides)
    check_ranges(config)
    saved = dataclasses.replace(saved, config=config)
    tokenizer = load_tokenizer(saved)

    import jax
    import numpy as np

    from bacr_jax.data import prompts as prompting
    from bacr_jax.data.environment import make_rules
    from bacr_jax.data.extraction import answer_text, decode_ids
    from bacr_jax.evaluation.job import open_decoder
    from bacr_jax.learner import policy as policies
    from bacr_jax.rollout.generate import generate
    from bacr_jax.rollout.sampling import sampling_params
    from bacr_jax.types import NO_BUDGET

    style = prompting.format_for(config)
    plain = config.data.prompt_format == "auto" and config.method != SELF_BUDGETER
    if (
        arguments.run is None
        and plain
        and not any(key.startswith("data.train=") for key in arguments.overrides)
    ):
        # Nobody says what the folder was trained on.
        style = prompting.FORMATS["think_answer"]
    prompts, _ = prompting.encode_prompts(
        tokenizer, [arguments.question], style, max_tokens=config.data.max_prompt_tokens
    )
    vocab_size = policies.vocabulary_rows(config, len(tokenizer))
    prompts = _asked(prompts, tokenizer, style, arguments.budgets, config.eval)
    count = len(arguments.budgets)
    longest = max(config.budget.max if b is None else max(b, 1) for b in arguments.budgets)
    room = policies.model_shape(config, vocab_size).max_positions
    free = room - int(prompts.lengths.max()) - config.rollout.answer_tokens
    if longest > free:
        raise UserError(
            f"--budget {arguments.budget}: the model's {room} positions leave {free} for thinking; "
            "write a smaller budget"
        )
    decoder = open_decoder(saved, config, vocab_size, max_thinking=longest, slots=count)
    told = np.array([NO_BUDGET if b is None else b for b in arguments.budgets], np.int32)
    live = _Live(lambda ids: decode_ids(tokenizer, ids), say) if count == 1 else None
    found = generate(
        decoder.params,
        prompts,
        told,
        np.where(told == NO_BUDGET, longest, told)[:, None],
        jax.random.key(arguments.seed),
        spec=decoder.spec,
        rules=make_rules(tokenizer, style, vocab_size),
        sampling=sampling_params(arguments.temperature, arguments.top_p),
        phi_of=decoder.phi_of,
        truncated=arguments.top_p < 1,
        on_tokens=live,
    )
    trunks, branches = found.trunks, found.branches
    tags = {"opened": style.answer_open, "closed": style.answer_close}
    for row, budget in enumerate(arguments.budgets):
        start, end = branches.forced[row, 0], branches.forced[row, 0] + branches.sampled[row, 0]
        answer = answer_text(tokenizer, branches.tokens[row, 0, start:end].tolist(), **tags)
        thinking = trunks.tokens[row, trunks.prompt_lengths[row] :][: trunks.sampled[row]]
        if live is None:
            name = "no budget" if budget is None else f"budget {budget}"
            say(f"--- {name} ---\n{decode_ids(tokenizer, thinking.tolist())}")
        say(f"\n{answer}\n[{trunks.thinking[row]} thinking tokens]\n")


def _asked(
    prompts: Any, tokenizer: Any, style: Any, budgets: Sequence[int | None], config: EvalConfig
) -> Any:
    """The prompt once per budget, with the budget in it where the format has a place for it."""
    import jax
    import numpy as np

    from bacr_jax.evaluation.samples import with_declared_budget

    numbers = tuple(budget for budget in budgets if budget is not None)
    settings = dataclasses.replace(config, budgets=numbers)
    rows = [
        prompts
        if budget is None
        else with_declared_budget(prompts, tokenizer, style, settings, budget)
        for budget in budgets
    ]
    width = max(row.tokens.shape[1] for row in rows)
    wide = lambda x: np.pad(x, ((0, 0), (0, width - x.shape[1])))
    rows = [dataclasses.replace(row, tokens=wide(np.asarray(row.tokens))) for row in rows]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *rows)


class _Live:
    """Writes the thinking while it comes; a character of several tokens waits until it is whole."""

    def __init__(self, decode: Callable[[list[int]], str], say: Callable[[str], Any]):
        self.decode, self.say, self.ids, self.shown = decode, say, list[int](), 0

    def __call__(self, row: int, tokens: Any) -> None:
        """Takes the new tokens of the only row."""
        self.ids += [int(token) for token in tokens]
        text = self.decode(self.ids).rstrip("\N{REPLACEMENT CHARACTER}")
        self.say(text[self.shown :])
        self.shown = max(self.shown, len(text))


@entry_point
def main(argv: Sequence[str] | None) -> int:
    """Entry point: 0 when answered, 2 with one line on stderr when the input can't be used."""
    # Orbax warns about a metadata file that only single-item checkpoints have.
    logging.getLogger("absl").setLevel(logging.ERROR)

    def say(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    try:
        ask(parse(argv), say)
    except OutOfMemory as error:
        return failure(f"{error}; write fewer or smaller numbers in --budget")
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
