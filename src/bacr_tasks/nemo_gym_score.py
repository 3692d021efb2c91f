"""Asks a server's `POST /verify` for the reward of an answer; run in a worker.

The grader's deadline ends what takes too long, and its memory of scores is the cache.
"""

import json
import urllib.error
import urllib.request
from typing import Any

# Characters of a reply: what is longer is no reward.
MOST = 1 << 20
# Beside the grader's deadline, so that a worker is not killed for every slow reply.
SECONDS = 60.0


def response(answer: str) -> dict[str, Any]:
    """An answer as the API of responses says it, in both forms that servers look for."""
    text = f"<answer>{answer}</answer>\n\\boxed{{{answer}}}"
    content = [{"type": "output_text", "text": text, "annotations": []}]
    message = {"type": "message", "role": "assistant", "id": "0", "status": "completed"}
    return {
        "id": "0",
        "object": "response",
        "created_at": 0,
        "model": "policy",
        "tools": [],
        "output": [message | {"content": content}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
    }


def score(answer: str, row: Any) -> float:
    """The reward; ValueError: the server can't be asked, or gives none."""
    url = row.metadata["url"]
    body = json.dumps({**row.metadata["row"], "response": response(answer)}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as reply:
            content = reply.read(MOST + 1)
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url} answers with status {error.code}") from None
    except OSError as error:
        raise ValueError(f"{url} can't be reached ({error})") from None
    try:
        reward = json.loads(content)["reward"] if len(content) <= MOST else None
    except (ValueError, KeyError, TypeError):
        reward = None
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise ValueError(f"{url} gives no number as reward: {content[:80]!r}")
    return float(reward)
