"""Tokenizers of Hugging Face folders, and from the tokens of an answer to the text graded."""

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

# Ids beyond this are slips, for which a table would be made all the same.
MOST_IDS = 1 << 24
# Classes that are what tokenizer.json says, and those that AutoTokenizer would build anew.
_GENERIC = ("PreTrainedTokenizer", "TokenizersBackend")
_REBUILT = ("LlamaTokenizer", "GPT2Tokenizer")
# Processor time and new memory of reading a tokenizer; one of 250,000 tokens takes 3 s and 1 GiB.
READ_SECONDS = 30.0
READ_MEMORY = 4 << 30
_READ_IN_LIMITS = ("tokenizer.json", "vocab.json", "merges.txt")
_JSON = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def load_tokenizer(
    folder: str | Path | None, *, where: str, model: str | Path | None = None
) -> Any:
    """The tokenizer of a Hugging Face folder; never of a name to download.

    Its `turn_ends` are the ids that the model's folder says it ends with.

    Args:
      model: folder of the model, if that is another one.
    """
    documents.check_model_folder(folder or "null", where)
    assert folder is not None
    # It imports what it needs while this process does.
    shared_process().start()
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer builds some classes anew, with the splitting of another model: Qwen2's for every
    # Qwen2 model, whatever class its folder names (R1-Distill's names Llama's), and GPT-2's without
    # the single digits of SmolLM2. What tokenizer.json says is read as it stands.
    declared = str(_said(Path(folder) / "tokenizer_config.json", "tokenizer_class"))
    declared = declared.removesuffix("Fast")
    written = declared in _REBUILT and (Path(folder) / "tokenizer.json").is_file()
    as_written = written or declared in _GENERIC
    reader: Any = PreTrainedTokenizerFast if as_written else AutoTokenizer
    try:
        _check_files(Path(folder))
        _try_in_limits(Path(folder))
        tokenizer = reader.from_pretrained(str(folder))
        vocab = tokenizer.get_vocab()
        _check_different_ids(vocab)
        largest = max(vocab.values(), default=0)
        if largest >= MOST_IDS:
            raise ValueError(f"an id is not below {MOST_IDS}")
    # Without a tokenizer in the folder, or with a damaged one: the class depends on what is wrong,
    # and the Rust reader raises plain Exception, or panics.
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


def is_refusal(error: BaseException) -> bool:
    """True if an error is an Exception or a panic of the Rust library, which is none."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _try_in_limits(folder: Path) -> None:
    """Reads a folder's tokenizer in a limited process first: a damaged one may abort its reader.

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
    """Returns why a tokenizer can't be used; empty if nothing was found.

    `digest`: of its files, which are not read again while they stay as they are.
    """
    limits: dict[str, Any] = {"seconds": READ_SECONDS, "memory": READ_MEMORY}
    return str(shared_process().ask("read_tokenizer", **limits, folder=folder))


def _check_files(folder: Path) -> None:
    """Raises for files that the readers behind would wait for or crash on."""
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".jinja", ".txt")):
        documents.check_regular(path)
        try:
            if path.name in _JSON:
                documents.read_object(path)
        except documents.NotJson as error:
            raise documents.NotJson(f"{path.name}: {error}") from None


def _turn_ends(folder: Path, largest: int) -> tuple[int, ...]:
    """What generation_config.json names as ends, or config.json where that names none.

    UserError: a file that is there can't be read, or names what is no id up to `largest`.
    """
    for file in (folder / "generation_config.json", folder / "config.json"):
        try:
            named = documents.read_object(file).get("eos_token_id")
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{file}: no JSON object ({reason}); copy the file again") from None
        ends = named if isinstance(named, list) else [] if named is None else [named]
        if not all(type(end) is int and 0 <= end <= largest for end in ends):
            raise UserError(
                f"{file}: eos_token_id is {shown(named)}; write an id of the tokenizer, 0 to "
                f"{largest}, or a list of them"
            )
        if ends:
            return tuple(ends)
    return ()


def _said(file: Path, key: str) -> Any:
    """What a JSON file says of a key; None: nothing, or it can't be read."""
    try:
        return documents.read_json(file)[key]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def decode_ids(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of ids: the bytes the stop tables saw, with nothing cleaned up or left out.

    Bytes that are no character (a row can be cut inside one) become the replacement character.
    """
    texts = vocabulary(tokenizer)
    return b"".join([texts[index] for index in ids]).decode(errors="replace")


def answer_text(
    tokenizer: Any, ids: Sequence[int], *, opened: str = "<answer>", closed: str = "</answer>"
) -> str:
    """Text of an answer with the tag that the suffix opened, ready to be graded.

    Args:
      opened: what the suffix ended with (`PromptFormat.answer_open`).
      closed: what ends the answer (`PromptFormat.answer_close`).

    Returns:
      `opened`, then the answer up to and including its first `closed`. An answer that never wrote
      `closed` is given whole, which shows a grader that it is unfinished.
    """
    body, tag, _ = decode_ids(tokenizer, ids).partition(closed)
    return opened + body + tag
