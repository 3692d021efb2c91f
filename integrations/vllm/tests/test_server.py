"""The OpenAI-compatible server returns the same responses over HTTP, and errors with status 400."""

import asyncio
import json
import os
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from vllm_world import server_of

from bacr_client import EngineError, fingerprint, read_folder
from bacr_vllm import Server

ROOT = Path(__file__).resolve().parents[3]
NAME = "both"


@pytest.fixture(scope="module")
def folder(world):
    return world / NAME / "out"


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    with server_of(folder, tmp_path_factory.mktemp("server") / "log") as address:
        yield address


def post(url, path, **body):
    """Posts a JSON request, and returns the status code and the JSON body of the reply."""
    raw = json.dumps({"model": "policy", **body}).encode()
    request = urllib.request.Request(url + path, raw, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def connected(url, folder):
    async def ready():
        server = Server(url, folder=fingerprint(folder))
        await server.connect()
        return server

    return asyncio.run(ready())


def answers(server, folder, jobs, **how):
    """Sends all (prompt, budget) pairs concurrently, and returns their responses."""
    rules, levels = read_folder(folder)

    async def together():
        calls = [server.answer(rules, p, b, levels=levels, **how) for p, b in jobs]
        return await asyncio.gather(*calls)

    return asyncio.run(together())


def test_the_cap_holds_over_http_token_for_token(url, folder, reference):
    rows = reference[NAME]
    found = answers(connected(url, folder), folder, [(r["prompt"], r["budget"]) for r in rows])
    same = sum(list(one.tokens) == row["response"] for one, row in zip(found, rows))
    print(f"\nover HTTP: {same} of {len(rows)} rows equal")
    assert same == len(rows)


def test_chats_and_levels_over_http(url, folder, reference):
    rows = [row for row in reference[NAME] if row["budget"] == 16]
    jobs = [([{"role": "user", "content": row["question"]}], "low") for row in rows]
    found = answers(connected(url, folder), folder, jobs)
    assert [list(one.tokens) for one in found] == [row["response"] for row in rows]
    assert all(one.text.endswith("</answer>") or not one.finished for one in found)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bad_budgets_have_status_400(url, path):
    chat = {"messages": [{"role": "user", "content": "4a2b3c1"}]}
    asked = {"prompt": [7, 8]} if path == "/v1/completions" else chat
    for bad in (-1, 8.5, "8", "high", 2**31, 10**6, [8]):
        status, found = post(url, path, max_tokens=1, **asked, vllm_xargs={"budget": bad})
        assert status == 400 and found["error"]["message"].startswith("budget: expected"), found
    for good in (0, 8, "low", "none"):
        assert post(url, path, max_tokens=1, **asked, vllm_xargs={"budget": good})[0] == 200
    status, found = post(url, path, max_tokens=1, **asked, vllm_xargs={"folder": "abc"})
    assert status == 400 and found["error"]["message"].startswith(
        "folder: the request is for the folder 'abc', but"
    )


def test_budgets_do_not_leak_between_equal_prompts(url, folder, reference):
    # Sends twelve concurrent requests with the same prompt. Prefix caching is on, which is the
    # server's default.
    row = next(row for row in reference["shared"] if row["budget"] == 64)
    jobs = [(row["prompt"], budget) for budget in (8, 16, 64) for _ in range(4)]
    server = connected(url, folder)
    found = answers(server, folder, jobs)
    alone = [answers(server, folder, [job])[0] for job in jobs[::4]]
    for start, one in zip((0, 4, 8), alone):
        assert {other.tokens for other in found[start : start + 4]} == {one.tokens}


def test_another_folder_is_refused(url, world):
    with pytest.raises(EngineError, match="serves another folder"):
        connected(url, world / "shared" / "out")


def evaluated(out, folder, *more):
    """Runs `bacr evaluate`, and returns the contents of results.md and samples.jsonl."""
    words = [os.environ["BACR_PYTHON"], "-m", "bacr_jax.evaluate", "--model", str(folder)]
    words += ["--data", "ledger", "--budgets", "0,8,low,none", "--every", "8", "--size", "8"]
    words += ["--slots", "16", "--out", str(out), "data.ledger.max_operand=3"]
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([*words, *more], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return (out / "results.md").read_text(), (out / "samples.jsonl").read_text()


def test_an_evaluation_over_http_is_ours(url, folder, tmp_path):
    ours = evaluated(tmp_path / "ours", folder)
    theirs = evaluated(tmp_path / "theirs", folder, "--engine", "vllm", "--url", url)
    print(f"\nevaluate --engine vllm: {len(ours[1].splitlines())} samples compared")
    assert ours == theirs
