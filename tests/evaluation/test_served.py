"""`evaluate --engine vllm`, against a server whose answers are known beforehand."""

import json
import shutil

import pytest

import bacr_client as client
import export_world
import hf_world
from bacr_client import http_json
from bacr_jax import evaluate
from bacr_jax.config import Config
from bacr_jax.export import from_run, policy_folder
from served_world import Served


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An exported policy of the ledger; nobody here asks its weights anything."""
    where = tmp_path_factory.mktemp("served")
    params = hf_world.random_params(export_world.LEDGER, conditioning=Config().conditioning)
    settings = {
        "model": export_world.MODEL,
        "budget": {"min": 8, "max": 16, "levels": {"low": 4}},
        "rollout": {"answer_tokens": 3},
    }
    run = export_world.make_run(where / "run", params, settings)
    from_run.export(run, where / "hf")
    return where / "hf"


@pytest.fixture
def key(folder):
    return client.fingerprint(folder)


def command(folder, out, *more, budgets="0,low,8,none"):
    words = ["--model", folder, "--data", "ledger", "--budgets", budgets, "--size", "6"]
    words += ["--slots", "2", "--out", out, "--engine", "vllm", *more]
    return evaluate.main([str(word) for word in words])


def samples(out):
    return [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]


def refusal(capsys, *arguments, **how):
    capsys.readouterr()
    assert command(*arguments, **how) == 2
    lines = [x for x in capsys.readouterr().err.splitlines() if not x.startswith("evaluating")]
    assert len(lines) == 1
    return lines[0]


# Budget: thinking tokens without tag, forced, all tokens, what ended it, text.
EXPECTED = {
    0: (0, 2, 4, "budget", "</think><answer>5</answer>"),
    4: (4, 2, 8, "budget", "aaaa</think><answer>5</answer>"),
    8: (5, 1, 9, "tag", "aaaaa</think><answer>5</answer>"),
    -1: (5, 1, 9, "tag", "aaaaa</think><answer>5</answer>"),
}


def test_ids_of_a_server_become_samples_and_tables(folder, key, tmp_path):
    out = tmp_path / "out"
    with Served(key) as server:
        assert command(folder, out, "--url", server.url) == 0
    found = samples(out)
    assert len(found) == 24
    for sample in found:
        thinking, forced, total, closed_by, text = EXPECTED[sample["budget"]]
        assert sample["thinking_tokens"] == thinking and sample["forced_tokens"] == forced
        assert sample["total_tokens"] == total and sample["closed_by"] == closed_by
        assert sample["text"] == text and sample["answer_tokens"] == 2 and sample["finished"]
        assert sample["extracted"] == "5" and sample["correct"] == (sample["gold"] == "5")
    results = json.loads((out / "results.json").read_text())
    assert results["settings"]["decoding"]["engine"] == "vllm"
    # Thinking and answers: two calls, one where nothing is thought.
    assert len(server.asked) == 6 * (1 + 2 + 2 + 2)
    asked = {(body["vllm_xargs"]["budget"], body["max_tokens"]) for body in server.asked}
    assert asked == {(0, 3), (4, 4), (4, 3), (8, 8), (8, 3), ("none", 16), ("none", 3)}
    assert {body["vllm_xargs"]["folder"] for body in server.asked} == {key}


def test_a_dense_curve_cuts_one_trace_at_several_places(folder, key, tmp_path):
    out = tmp_path / "out"
    with Served(key) as server:
        assert command(folder, out, "--url", server.url, "--every", "3", budgets="8") == 0
    found = [s for s in samples(out) if s["cut"] is not None]
    counts = {(s["cut"], s["thinking_tokens"], s["forced_tokens"], s["closed_by"]) for s in found}
    assert counts == {(3, 3, 2, "budget"), (6, 5, 1, "tag"), (8, 5, 1, "tag")}
    # One trace, and an answer at each place: those behind the thinking are one.
    assert len([b for b in server.asked if b["max_tokens"] == 3]) == 6 * (1 + 2)


def test_samples_have_seeds_of_their_own_which_a_second_run_has_too(folder, key, tmp_path):
    seeds = []
    for name in ("one", "two"):
        with Served(key) as server:
            more = ["--url", server.url, "--samples", "3"]
            assert command(folder, tmp_path / name, *more, budgets="4,8") == 0
        seeds.append(sorted(body["seed"] for body in server.asked))
        assert {(b["temperature"], b["top_p"]) for b in server.asked} == {(0.6, 0.95)}
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 6 * 3 * 2 * 2


@pytest.mark.slow
def test_an_engine_that_dies_leaves_what_is_done_and_the_command_goes_on(
    folder, key, tmp_path, capsys, monkeypatch
):
    with Served(key) as server:
        assert command(folder, tmp_path / "whole", "--url", server.url) == 0
    out = tmp_path / "out"
    monkeypatch.setattr(http_json, "BACK_OFF", (0.01,))
    with Served(key, dies_after=20) as server:
        line = refusal(capsys, folder, out, "--url", server.url)
    assert (
        "the connection was closed before the reply was complete. All answers that were finished"
        in line
    )
    done = samples(out)
    assert 0 < len(done) < 24
    with Served(key) as server:
        assert command(folder, out, "--url", server.url) == 0
    assert len(server.asked) < 6 * 7
    assert samples(out) == samples(tmp_path / "whole") and samples(out)[: len(done)] == done


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("config.json", '"closing_ids": [', '"closing_ids": [9, '),
        ("config.json", '"thinking":', '"no_thinking":'),
        ("generation_config.json", '"do_sample": false', '"stop_strings": "5"'),
    ],
)
def test_an_edited_folder_is_refused_before_a_server_is_asked(
    folder, tmp_path, capsys, name, old, new
):
    own = tmp_path / "hf"
    shutil.copytree(folder, own)
    text = (own / name).read_text()
    assert old in text
    (own / name).write_text(text.replace(old, new))
    line = refusal(capsys, own, tmp_path / "out", "--url", "http://127.0.0.1:9")
    assert f"{own / name} is not the file that was exported, because its SHA-256" in line


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ({"token_ids": [-1]}, "returned -1, which is not a token id"),
        ({"token_ids": [10**6]}, "returned 1000000, which is not a token id"),
        ({"token_ids": [19.0]}, "returned 19.0, which is not a token id"),
        ({"token_ids": [True]}, "returned True, which is not a token id"),
        ({"token_ids": [0]}, "the token id 0, which must not be sampled"),
        ({"token_ids": [19] * 50}, "engine returned 50 tokens, but"),
        (
            {"token_ids": [19], "logprobs": {"token_logprobs": [float("nan")]}},
            "must be a finite number",
        ),
    ],
)
def test_a_server_that_lies_about_its_tokens_is_one_line_and_no_result(
    folder, key, tmp_path, capsys, lie, said
):
    out = tmp_path / "out"
    with Served(key, lie=lie) as server:
        assert said in refusal(capsys, folder, out, "--url", server.url)
    assert not (out / "results.json").exists()


def test_a_server_that_can_not_be_used_is_one_line(folder, key, tmp_path, capsys):
    out = tmp_path / "out"
    with Served(key) as server:
        gone = server.url
    assert "no server responds at this address (Connection refused)" in refusal(
        capsys, folder, out, "--url", gone
    )
    cases = [
        (Served("0123456789ab"), "serves another folder than this command uses (folder: found"),
        (Served(key, plugin=False), "does not read budgets; install the plugin bacr-vllm"),
        (Served(key, models={"data": []}), "is not an OpenAI-compatible server"),
        (Served(key, models=[1]), "is not an OpenAI-compatible server"),
        (Served(key, length=20), "can have 34 tokens together, but the server allows only 20"),
    ]
    for server, expected in cases:
        with server:
            assert expected in refusal(capsys, folder, out, "--url", server.url)
    # Nothing was evaluated: no folder stays.
    assert not out.exists()


ARITHMETIC = {"compute_dtype", "product_dtype", "attention", "decode_attention"}


def test_nothing_is_recorded_of_the_arithmetic_of_a_server(folder, key, tmp_path):
    out = tmp_path / "out"
    with Served(key) as server:
        assert command(folder, out, "--url", server.url, budgets="4") == 0
        settings = json.loads((out / "evaluation.json").read_text())
        assert not ARITHMETIC & settings["decoding"].keys()


@pytest.mark.parametrize("override", ["model.compute_dtype=bfloat16", "rollout.attention=xla"])
def test_a_key_that_a_server_does_not_read_is_one_line(folder, tmp_path, capsys, override):
    line = refusal(capsys, folder, tmp_path / "out", "--url", "http://127.0.0.1:9", override)
    assert f"{override.partition('=')[0]} has no effect with --url, because the server" in line
    assert not (tmp_path / "out").exists()


def test_options_that_make_no_sense_are_one_line(folder, tmp_path, capsys):
    say = lambda *words: refusal(capsys, folder, tmp_path / "out", *words)
    assert "needs the address of a server; pass --url http://HOST:PORT" in say()
    assert "is not an address" in say("--url", "localhost:8000")
    assert "is not an address" in say("--url", "http://localhost:99999")
    assert "--engine-python" in say("--url", "http://a", "--engine-python", "python3")
    boxed = ["--url", "http://a", "data.prompt_format=think_answer"]
    assert "prompt_format" in say(*boxed)
    words = ["--run", "runs/a", "--data", "ledger", "--engine", "vllm", "--url", "http://a"]
    assert evaluate.main(words) == 2
    assert "pass --model FOLDER with the run's export" in capsys.readouterr().err
    assert evaluate.main(["--run", "runs/a", "--url", "http://a"]) == 2
    assert "--url has no effect without --engine vllm" in capsys.readouterr().err


def test_a_folder_of_others_is_one_line(tmp_path, capsys, ledger_tokens):
    params = hf_world.random_params(export_world.LEDGER)
    path = tmp_path / "plain"

    policy_folder.save_policy(path, params, config=export_world.LEDGER, tokenizer=ledger_tokens)
    line = refusal(capsys, path, tmp_path / "out", "--url", "http://a", budgets="4")
    assert "is not a folder that bacr export wrote" in line


def test_an_engine_samples_what_its_folder_writes(folder, tmp_path, capsys):
    other = shutil.copytree(folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["thinking"]["never_sampled"] = "0"
    (other / "config.json").write_text(json.dumps(config))
    (other / "manifest.json").unlink()
    line = refusal(capsys, other, tmp_path / "out", "--url", "http://a")
    assert "leave out data.prompt_format and data.closing_text" in line
