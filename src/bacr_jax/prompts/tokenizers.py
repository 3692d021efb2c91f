"""Loads tokenizers of Hugging Face folders, and converts the tokens of answers to text."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bacr_jax import documents
from bacr_jax.config.values import shown
from bacr_jax.errors import UserError, reason_of
from bacr_jax.prompts.limited import Failed, shared_process
from bacr_jax.prompts.stop_strings import vocabulary

# Larger ids are taken for errors in a file, because tables have an entry for every smaller id.
MOST_IDS = 1 << 24
# Classes that read tokenizer.json as it is, and classes that AutoTokenizer builds differently.
_GENERIC = ("PreTrainedTokenizer", "TokenizersBackend")
_REBUILT = ("LlamaTokenizer", "GPT2Tokenizer")
# Limits of processor time (s) and new memory (bytes) for reading a tokenizer. One with 250,000
# tokens takes 3 s and 1 GiB.
READ_SECONDS = 30.0
READ_MEMORY = 4 << 30
_READ_IN_LIMITS = ("tokenizer.json", "vocab.json", "merges.txt")
_JSON = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def load_tokenizer(
    folder: str | Path | None, *, where: str, model: str | Path | None = None
) -> Any:
    """Loads the tokenizer of a Hugging Face folder; nothing is downloaded.

    Args:
      folder: folder with the tokenizer.
      where: name of the setting, for error messages.
      model: folder of the model if it is another one.

    Returns:
      The tokenizer. Its attribute `turn_ends` has the ids in the model's folder that end a turn.

    Raises:
      UserError: the folder is missing or its tokenizer can't be read.
    """
    documents.check_model_folder(folder or "null", where)
    assert folder is not None
    folder = Path(folder)
    # The limited process is started first, so that its imports run while this process imports too.
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
            raise ValueError(f"an id is not below {MOST_IDS}")
    # The class of the error depends on what is missing or damaged. The Rust reader raises plain
    # Exception, or panics.
    except BaseException as error:
        if not is_refusal(error):
            raise
        raise UserError(
            f"{where}: no tokenizer that can be read in {str(folder)!r} ({reason_of(error)}); "
            "write a Hugging Face folder with tokenizer.json"
        ) from None
    tokenizer.turn_ends = _turn_ends(Path(model or folder), largest)
    return tokenizer


def _check_different_ids(vocab: Mapping[str, int]) -> None:
    """Checks that no two tokens of a vocabulary have the same id.

    With equal ids a text would be encoded as another text, without any error.

    Raises:
      ValueError: two tokens have the same id.
    """
    tokens: dict[int, str] = {}
    for token, id in vocab.items():
        if id in tokens:
            first, second = sorted((tokens[id], token))
            raise ValueError(f"tokens {shown(first)} and {shown(second)} have the same id {id}")
        tokens[id] = token


def _reader(folder: Path) -> Any:
    """Returns the class of transformers that reads a folder's tokenizer unchanged.

    AutoTokenizer builds some classes anew, with another model's splitting: Qwen2's for every Qwen2
    model, even if its folder has another class (R1-Distill's has Llama's), and GPT-2's without the
    single digits of SmolLM2. For these classes tokenizer.json is read as it is.
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

    The class of panics is not a subclass of Exception.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _try_in_limits(folder: Path) -> None:
    """Reads a folder's tokenizer in a limited process, because a damaged one may abort its reader.

    Raises:
      ValueError: the tokenizer can't be used.
    """
    digest = hashlib.sha256()
    for name in _READ_IN_LIMITS:
        path = folder / name
        content = documents.read_file(path) if path.is_file() else b""
        digest.update(f"{name} {len(content)} ".encode() + content)
    try:
        fault = _fault_in_limits(str(folder.absolute()), digest.hexdigest())
    except Failed as error:
        raise ValueError(str(error)) from None
    if fault:
        raise ValueError(fault)


@functools.lru_cache(maxsize=256)
def _fault_in_limits(folder: str, digest: str) -> str:
    """Returns the reason why a tokenizer can't be used; empty if it can be.

    Args:
      digest: digest of the tokenizer's files. It is part of the cache's key, so that unchanged
        files are not read again.
    """
    limits: dict[str, Any] = {"seconds": READ_SECONDS, "memory": READ_MEMORY}
    return str(shared_process().ask("read_tokenizer", **limits, folder=folder))


def _check_files(folder: Path) -> None:
    """Raises OSError or ValueError for files on which the libraries would hang or crash."""
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".json", ".jinja", ".txt"):
            continue
        documents.check_regular(path)
        try:
            if path.name in _JSON:
                documents.read_object(path)
        except documents.NotJson as error:
            raise documents.NotJson(f"{path.name}: {error}") from None


def _turn_ends(folder: Path, largest: int) -> tuple[int, ...]:
    """Returns the ids that end a turn according to a model's folder.

    They are read from generation_config.json, or from config.json if the former has none.

    Args:
      largest: largest id of the tokenizer.

    Raises:
      UserError: an existing file can't be read, or has a value that is not an id of the tokenizer.
    """
    for file in (folder / "generation_config.json", folder / "config.json"):
        try:
            value = documents.read_object(file).get("eos_token_id")
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{file}: no JSON object ({reason}); copy the file again") from None
        if value is None:
            continue
        ends = value if isinstance(value, list) else [value]
        if not all(type(end) is int and 0 <= end <= largest for end in ends):
            raise UserError(
                f"{file}: eos_token_id is {shown(value)}; write an id of the tokenizer, 0 to "
                f"{largest}, or a list of them"
            )
        if ends:
            return tuple(ends)
    return ()


def _read_key(file: Path, key: str) -> Any:
    """Returns the value of a key in a JSON file; None if key or file can't be read."""
    try:
        return documents.read_json(file)[key]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def decode_ids(tokenizer: Any, ids: Sequence[int]) -> str:
    """Converts ids to text from the bytes that stop tables use, without any clean-up.

    A row can be cut inside a character. Incomplete characters become the replacement character.
    """
    texts = vocabulary(tokenizer)
    return b"".join([texts[index] for index in ids]).decode(errors="replace")


def answer_text(
    tokenizer: Any, ids: Sequence[int], *, opened: str = "<answer>", closed: str = "</answer>"
) -> str:
    """Converts the ids of an answer to text for grading, including the tag before it.

    Args:
      opened: text at the end of the suffix (`PromptFormat.answer_open`).
      closed: text that ends the answer (`PromptFormat.answer_close`).

    Returns:
      `opened`, then the answer up to and including its first `closed`. An answer without `closed`
      is returned completely, from which a grader sees that it is unfinished.
    """
    body, tag, _ = decode_ids(tokenizer, ids).partition(closed)
    return opened + body + tag
