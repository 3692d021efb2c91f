"""Rows of NeMo Gym, scored by the server of their environment: `nemo_gym:FILE?verify=URL`.

FILE is its JSONL: a line has `responses_create_params.input`, the messages, and whatever the
server's `POST /verify` wants beside the response.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SCORER = str(Path(__file__).with_name("nemo_gym_score.py"))
# The scorer is this project's; the server that it asks is the user's.
THIRD_PARTY, CHECKED = False, True
_ADDRESS = re.compile(r"https?://([\w.-]+|\[[\da-fA-F:]+\])(:(?P<port>\d{1,5}))?(/\S*)?")


def source(spec: str, *, read: Callable[..., Sequence[Mapping[str, Any]]]) -> SimpleNamespace:
    """The source that `nemo_gym:` and this name; both splits are what the file holds.

    Args:
      read: gives the rows of the file FILE, of which it is told `split` and a name `where`.

    Raises:
      ValueError: no server is named. `questions`: what `read` raises, or one is no such row.
    """
    name, _, url = spec.partition("?verify=")
    match = _ADDRESS.fullmatch(url)
    if not match or not 0 < int(match["port"] or 80) < 65536:
        raise ValueError(
            f"nemo_gym:{spec}: names no server; write nemo_gym:FILE?verify=http://HOST:PORT/verify"
        )

    def questions(split: str) -> list[dict[str, Any]]:
        where, stem = f"nemo_gym:{name}", Path(name).stem
        return [
            _row(f"{where} row {number}", f"{stem}-{split}-{number}", row, url)
            for number, row in enumerate(read(name, split=split, where=where), start=1)
        ]

    return SimpleNamespace(questions=questions, SCORE=SCORER)


def _row(where: str, id: str, row: Mapping[str, Any], url: str) -> dict[str, Any]:
    try:
        said = row["responses_create_params"]["input"]
        messages = [said] if isinstance(said, str) else [_text(one["content"]) for one in said]
        question = "\n\n".join(filter(None, messages))
    except (KeyError, TypeError):
        raise ValueError(f"{where}: no row with responses_create_params.input; fix it") from None
    answer = next((row[key] for key in ("expected_answer", "answer") if key in row), None)
    shown = answer if isinstance(answer, str) else None
    return {"id": id, "question": question, "answer": shown, "metadata": {"row": row, "url": url}}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content)
