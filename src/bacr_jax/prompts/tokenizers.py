"""Loads the tokenizers of Hugging Face folders, and decodes the tokens of answers."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bacr_jax import files
from bacr_jax.config.values import shown
from bacr_jax.errors import UserError, reason_of
from bacr_jax.prompts.limited import Failed, shared_process
from bacr_jax.prompts.stop_strings import vocabulary

# Exclusive upper bound of token ids. Larger ids are treated as an error in the file, because tables
# have one entry per id.
MOST_IDS = 1 << 24
# Tokenizer classes that load tokenizer.json unchanged, and classes that AutoTokenizer rebuilds
# differently.
_GENERIC = ("PreTrainedTokenizer", "TokenizersBackend")
_REBUILT = ("LlamaTokenizer", "GPT2Tokenizer")
# Limits for loading a tokenizer: CPU time in seconds and additional memory in bytes. A tokenizer
# with 250,000 tokens takes 3 s and 1 GiB.
READ_SECONDS = 30.0
READ_MEMORY = 4 << 30
_READ_IN_LIMITS = ("tokenizer.json", "vocab.json", "merges.txt")
_JSON = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def load_tokenizer(
    folder: str | Path | None, *, where: str, model: str | Path | None = None
) -> Any:
    """Loads the tokenizer of a Hugging Face folder. Nothing is downloaded.

    Args:
      folder: folder with the tokenizer.
      where: name of the setting, for error messages.
      model: folder of the model, if it differs from `folder`.

    Returns:
      The tokenizer. Its attribute `turn_ends` contains the EOS ids that the model's folder
      specifies.

    Raises:
      UserError: If the folder is missing or its tokenizer cannot be loaded.
    """
    files.check_model_folder(folder or "null", where)
    assert folder is not None
    folder = Path(folder)
    # Started first, so that its imports run in parallel with the imports of this process.
    shared_process().start()
    reader = _reader(folder)
    try:
        _check_files(folder)
        _try_in_limits(folder)
        tokenizer = reader.from_pretrained(str(folder))
        vocab = tokenizer.get_vocab()
        _check_different_ids(vocab)
        largest = max(vocab.values(), default=0)
        if largest >= MOST_IDS:
            raise ValueError(f"a token id is not below {MOST_IDS}")
    # The type of the error depends on which file is missing or damaged. The Rust library raises
    # plain Exception or panics.
    except BaseException as error:
        if not is_refusal(error):
            raise
        raise UserError(
            f"{where}: the tokenizer in {str(folder)!r} is missing or can't be read "
            f"({reason_of(error)}); use a model folder that contains a tokenizer.json"
        ) from None
    tokenizer.turn_ends = _turn_ends(Path(model or folder), largest)
    return tokenizer


def _check_different_ids(vocab: Mapping[str, int]) -> None:
    """Checks that no two tokens of a vocabulary have the same id.

    With duplicate ids, a text would silently be encoded as a different text.

    Raises:
      ValueError: If two tokens have the same id.
    """
    tokens: dict[int, str] = {}
    for token, id in vocab.items():
        if id in tokens:
            first, second = sorted((tokens[id], token))
            raise ValueError(f"tokens {shown(first)} and {shown(second)} have the same id {id}")
        tokens[id] = token


def _reader(folder: Path) -> Any:
    """Returns the transformers class that loads a folder's tokenizer unchanged.

    AutoTokenizer rebuilds some tokenizers with the pre-tokenization of another model. It uses
    Qwen2's class for all Qwen2 models, even if the folder specifies another class (R1-Distill
    specifies Llama's). For SmolLM2, it uses GPT-2's pre-tokenization, which does not split digits.
    In these cases, tokenizer.json is loaded directly.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    declared = str(_read_key(folder / "tokenizer_config.json", "tokenizer_class"))
    declared = declared.removesuffix("Fast")
    is_rebuilt = declared in _REBUILT and (folder / "tokenizer.json").is_file()
    if is_rebuilt or declared in _GENERIC:
        return PreTrainedTokenizerFast
    return AutoTokenizer


def is_refusal(error: BaseException) -> bool:
    """True if an error is an Exception or a panic of the Rust library.

    The exception class of panics is not derived from Exception.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _try_in_limits(folder: Path) -> None:
    """Test-loads a tokenizer in the resource-limited process.

    A damaged file can crash the tokenizer library, so the main process only loads files that passed
    this test.

    Raises:
      ValueError: If the tokenizer cannot be used.
    """
    digest = hashlib.sha256()
    for name in _READ_IN_LIMITS:
        path = folder / name
        content = files.read_file(path) if path.is_file() else b""
        digest.update(f"{name} {len(content)} ".encode() + content)
    try:
        fault = _fault_in_limits(str(folder.absolute()), digest.hexdigest())
    except Failed as error:
        raise ValueError(str(error)) from None
    if fault:
        raise ValueError(fault)


@functools.lru_cache(maxsize=256)
def _fault_in_limits(folder: str, digest: str) -> str:
    """Loads a tokenizer in a process with limits, and returns why it is unusable, or "".

    Args:
      digest: digest of the tokenizer's files. It is part of the cache key, so that unchanged files
        are not checked again.
    """
    limits: dict[str, Any] = {"seconds": READ_SECONDS, "memory": READ_MEMORY}
    return str(shared_process().ask("read_tokenizer", **limits, folder=folder))


def _check_files(folder: Path) -> None:
    """Raises OSError or ValueError for files that would make the libraries hang or crash."""
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".json", ".jinja", ".txt"):
            continue
        files.check_regular(path)
        try:
            if path.name in _JSON:
                files.read_object(path)
        except files.NotJson as error:
            raise files.NotJson(f"{path.name}: {error}") from None


def _turn_ends(folder: Path, largest: int) -> tuple[int, ...]:
    """Returns the EOS ids that a model's folder specifies.

    They are read from generation_config.json, or from config.json if generation_config.json does
    not contain any.

    Args:
      largest: largest id of the tokenizer.

    Raises:
      UserError: If an existing file cannot be parsed, or contains a value that is not an id of the
        tokenizer.
    """
    for file in (folder / "generation_config.json", folder / "config.json"):
        try:
            value = files.read_object(file).get("eos_token_id")
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"{file} can't be read as a JSON object ({reason}); replace it by an undamaged copy"
            ) from None
        if value is None:
            continue
        ends = value if isinstance(value, list) else [value]
        if not all(type(end) is int and 0 <= end <= largest for end in ends):
            raise UserError(
                f"{file}: `eos_token_id` is {shown(value)}; use a token id of the tokenizer, from "
                f"0 to {largest}, or a list of them"
            )
        if ends:
            return tuple(ends)
    return ()


def _read_key(file: Path, key: str) -> Any:
    """Returns the value of a key in a JSON file, or None if the key or the file cannot be read."""
    try:
        return files.read_json(file)[key]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def decode_ids(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decodes token ids to the exact text that they encode, without any clean-up of spaces.

    Stop string tables use the same bytes. Incomplete multi-byte characters, such as at the end of a
    sequence, are decoded as the replacement character.
    """
    texts = vocabulary(tokenizer)
    return b"".join([texts[index] for index in ids]).decode(errors="replace")


def answer_text(
    tokenizer: Any, ids: Sequence[int], *, opened: str = "<answer>", closed: str = "</answer>"
) -> str:
    """Decodes the token ids of an answer for grading, including the tag before it.

    Args:
      opened: text at the end of the suffix (`PromptFormat.answer_open`).
      closed: text that ends the answer (`PromptFormat.answer_close`).

    Returns:
      `opened`, followed by the answer up to and including the first `closed`. An answer without
      `closed` is returned in full, so that the grader can tell that it is unfinished.
    """
    body, tag, _ = decode_ids(tokenizer, ids).partition(closed)
    return opened + body + tag
