"""Rows of NeMo Gym, scored by the server of their environment: `nemo_gym:FILE?verify=URL`.

FILE is its JSONL: a line has `responses_create_params.input`, the messages, and whatever the
server's `POST /verify` wants beside the response.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SCORER = str(Path(__file__).with_name("nemo_gym_score.py"))
LARGEST = 1 << 30


def source(spec: str, *, base: str) -> SimpleNamespace:
    """The source that `nemo_gym:` and this name; both splits are what the file holds.

    Args:
      base: folder that a relative path starts from.

    Raises:
      ValueError: no server is named. `questions`: the file can't be read, or a line is no row.
    """
    name, found, url = spec.partition("?verify=")
    if not found or not url.startswith(("http://", "https://")):
        raise ValueError(
            f"nemo_gym:{spec}: names no server; write nemo_gym:FILE?verify=http://HOST:PORT/verify"
        )
    path = Path(base, name)

    def questions(split: str) -> list[dict[str, Any]]:
        try:
            if path.stat().st_size > LARGEST:
                raise ValueError(f"nemo_gym:{name}: is larger than {LARGEST:,} bytes; split it")
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ValueError(f"nemo_gym:{name}: {error.strerror}; write a JSONL file") from None
        return [
            _row(f"nemo_gym:{name} line {number}", f"{path.stem}-{split}-{number}", line, url)
            for number, line in enumerate(lines, start=1)
            if line.strip()
        ]

    return SimpleNamespace(questions=questions, SCORE=SCORER)


def _row(where: str, id: str, line: str, url: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
        said = row["responses_create_params"]["input"]
        messages = [said] if isinstance(said, str) else [_text(one["content"]) for one in said]
        question = "\n\n".join(filter(None, messages))
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{where}: no row with responses_create_params.input; fix it") from None
    answer = next((row[key] for key in ("expected_answer", "answer") if key in row), None)
    shown = answer if isinstance(answer, str) else None
    return {"id": id, "question": question, "answer": shown, "metadata": {"row": row, "url": url}}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content)
