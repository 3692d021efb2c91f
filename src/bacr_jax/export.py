"""`python -m bacr_jax.export --run DIR --out HFDIR`: a run's policy for transformers."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bacr_jax.config import Config
from bacr_jax.config.cli import Parser, entry_point
from bacr_jax.data.prompts import format_for
from bacr_jax.data.told import budget_words
from bacr_jax.errors import UserError
from bacr_jax.learner.policy import model_shape
from bacr_jax.methods.registry import built_in_methods, declares_budget
from bacr_jax.model import hf
from bacr_jax.model.hf import names, writing
from bacr_jax.model.hf.hf_config import WORDS
from bacr_jax.model.sizes import Qwen2Config
from bacr_jax.runs.open import read_config, read_run

Params = dict[str, Any]

DESCRIPTION = (
    "Writes the newest checkpoint of a run as a Hugging Face folder. A budget-conditioned policy "
    "loads with AutoModelForCausalLM.from_pretrained(HFDIR, trust_remote_code=True) and takes "
    "budget=; one that is told in words is plain Qwen2, and its config.json has the sentence. "
    "Prints the files written."
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog="python -m bacr_jax.export",
        description=DESCRIPTION,
        advice="write python -m bacr_jax.export --run DIR --out HFDIR",
    )
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="run folder")
    parser.add_argument("--out", type=Path, required=True, metavar="HFDIR", help="a new folder")
    parser.add_argument(
        "--base", type=Path, metavar="DIR", help="where model.path lies now, if it was moved"
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(writing.TORCH_NAME.values()),
        help="type of the weights; by default that of model.path if it holds every value exactly, "
        "else float32",
    )
    return parser.parse_args(argv)


def _shape(config: Config, base: Path | None, params: Params) -> Qwen2Config:
    """The model's shape, checked against its parameters."""
    rows = params["embed"].shape[0]
    shape = model_shape(config, rows) if base is None else hf.read_hf_config(base)
    for entry in names.backbone(shape):
        leaf: Any = params
        for key in entry.path:
            leaf = leaf.get(key, {})
        own, expected = getattr(leaf, "shape", None), entry.leaf_shape(shape.num_layers)
        if own != expected:
            raise UserError(
                f"checkpoint: {'/'.join(entry.path)} has shape {own}, but "
                f"{base or 'config.yaml'} says {expected}; write the --base it was trained from"
            )
    return shape


def export(
    run: Path, out: Path, *, base: Path | None = None, dtype: str | None = None
) -> list[str]:
    """Writes the newest checkpoint of a run as a Hugging Face folder.

    Args:
      run: run folder.
      out: a folder that does not exist yet.
      base: where `model.path` lies now; None: where the config says.
      dtype: see `hf.save_policy`.

    Returns:
      Names of the files written.

    Raises:
      UserError: the run or a folder can't be used; nothing is written then.
    """
    writing.check_free(out)
    config, _, params = read_run(run)
    if base is None and config.model.path is not None:
        base = Path(config.model.path)
    if base is not None and not (base / "config.json").is_file():
        raise UserError(
            f"{base}: holds no config.json; write --base with the folder the run started from"
        )
    tokenizer: Any = config.model.tokenizer
    if config.data.train == "ledger":
        from bacr_jax.data.ledger import ledger_tokenizer

        tokenizer = ledger_tokenizer()
    module = None
    if "budget" in params:
        module = hf.BudgetModule(config.conditioning, config.budget.max)
    return hf.save_policy(
        out,
        params,
        config=_shape(config, base, params),
        module=module,
        source=base,
        tokenizer=tokenizer,
        dtype=dtype,
        budget_words=told_in(config) or None,
        levels=config.budget.levels,
    )


def told_in(config: Config) -> str:
    """The sentence that tells the policy of a run its budget; "": none does."""
    return budget_words(config, format_for(config)) if config.conditioning.in_words else ""


@entry_point
def main(argv: Sequence[str] | None) -> None:
    """Entry point: 0 when written, 2 with one line on stderr when the input can't be used."""
    # Orbax warns about a metadata file that only single-item checkpoints have.
    logging.getLogger("absl").setLevel(logging.ERROR)
    arguments = parse(argv)
    files = export(arguments.run, arguments.out, base=arguments.base, dtype=arguments.dtype)
    for name in files:
        print(arguments.out / name)
    config = read_config(arguments.run)
    if words := told_in(config):
        print(f"its prompts tell the budget after the question: {words} (config.json, {WORDS})")
    if config.method in built_in_methods() and declares_budget(config):
        needs = f"evaluate and generate need method={config.method}"
        print(f"its responses open with a budget: {needs}")


if __name__ == "__main__":
    sys.exit(main())
