"""Example of a thinking budget on a llama.cpp server, for a policy with the budget in its prompt.

    llama-server --model policy.gguf --jinja --port 8080
    python examples/ask_llama_cpp.py --folder hf --budget 64 "What is 7 times 8?"

`hf` is the folder of `bacr export` from which policy.gguf was converted; only its config.json is
read. The server renders the folder's chat template with the budget. The thinking is one request
with at most `budget` tokens, and the answer is a second one after the closing text of training.
Both requests contain token ids, so that no text is tokenized twice.

docs/llama-cpp.md describes the conversion. Standard library and bacr_client only.
"""

import argparse
import json
import sys
import urllib.error
import urllib.request
from typing import Any

from bacr_client import Answering, Call, Thinking, read_budget, read_folder
from bacr_client.calls import Response, response_of

# Sampling from the whole distribution, as in training. llama.cpp's defaults would truncate it.
FULL_DISTRIBUTION = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Posts JSON to the server and returns its reply.

    Raises:
      ValueError: the server is missing or refuses the request.
    """
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + path, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        raise ValueError(f"{url}{path}: {error.read(500).decode(errors='replace')}") from None
    except OSError as error:
        raise ValueError(f"{url}: {error}; pass --url with a running llama-server") from None


def ask(
    url: str, folder: str, question: str, budget: Any, temperature: float = 0.0, seed: int = 0
) -> Response:
    """Asks a question within a budget.

    Args:
      url: address of the server.
      folder: exported folder of the policy.
      question: content of the user's message.
      budget: number of thinking tokens, name of a level, or None.
      temperature: sampling temperature. 0 means greedy decoding.
      seed: seed of the sampling.

    Raises:
      ValueError: the folder, the budget or a reply of the server is invalid.
    """
    rules, levels = read_folder(folder)
    tokens = read_budget(budget, levels)
    variables = {} if tokens is None else {"budget": tokens}
    chat = {"messages": [{"role": "user", "content": question}], "chat_template_kwargs": variables}
    prompt = post(url, "/apply-template", chat)["prompt"]
    text = {"content": prompt, "add_special": False, "parse_special": True}
    prompt_ids = post(url, "/tokenize", text)["tokens"]
    settings = {
        **FULL_DISTRIBUTION,
        "temperature": temperature,
        "seed": seed,
        "return_tokens": True,
        "logit_bias": [[token, False] for token in sorted(rules.never)],
    }
    thinking = Thinking(rules, prompt_ids, rules.limit(tokens))
    _finish(url, thinking, settings)
    answering = thinking.answering()
    _finish(url, answering, settings)
    return response_of(thinking, answering)


def _finish(url: str, segment: Thinking | Answering, settings: dict[str, Any]) -> None:
    """Samples a segment, the thinking or the answer, until it has ended."""
    while (call := segment.call()) is not None:
        reply = post(url, "/completion", {**settings, **_fields(call)})
        segment.take(reply["tokens"])


def _fields(call: Call) -> dict[str, Any]:
    return {"prompt": call.prompt, "n_predict": call.max_tokens, "stop": call.stop}


def main() -> int:
    """Asks one question and prints the response."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="address of llama-server")
    parser.add_argument("--folder", required=True, help="exported folder of the policy")
    parser.add_argument("--budget", help="thinking tokens, a level, or none")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("question")
    options = parser.parse_args()
    budget = options.budget
    if budget is not None and budget.isdecimal():
        budget = int(budget)
    try:
        response = ask(
            options.url,
            options.folder,
            options.question,
            budget,
            options.temperature,
            options.seed,
        )
        reply = post(options.url, "/detokenize", {"tokens": response.tokens})
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(reply["content"])
    used = len(response.thinking)
    print(f"{used} thinking tokens, closed by {response.closed_by}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
