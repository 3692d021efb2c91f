"""llama.cpp's server answers a policy with the budget in its prompt as this package does."""

import contextlib
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import gguf_world
import hf_world
import interop_world
from bacr_gguf.tokenizer import USER_DEFINED
from bacr_jax.export.template import chat_template
from bacr_jax.prompts.formats import FORMATS

EXAMPLES = Path(__file__).parents[2] / "examples"
ASK = runpy.run_path(str(EXAMPLES / "ask_llama_cpp.py"))
TEMPLATE = runpy.run_path(str(EXAMPLES / "llama_cpp_template.py"))
BUDGETS = [0, 8, 16, 64]
SERVER = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx = 512
params.n_parallel = 1
params.cpuparams.n_threads = 1
params.hostnames = ["127.0.0.1"]
params.port = 0
params.use_jinja = True
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
time.sleep(600)
"""


def gguf_of(folder, path, template=None):
    """Writes an exported folder of characters as a GGUF file, with every token found as text."""
    config = json.loads((folder / "config.json").read_text())
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    tokens += [f"<unused{index}>" for index in range(config["vocab_size"] - len(tokens))]
    kind = config["model_type"]
    template = template or (folder / "chat_template.jinja").read_text()
    settings = {
        f"{kind}.block_count": ("uint32", config["num_hidden_layers"]),
        f"{kind}.context_length": ("uint32", config["max_position_embeddings"]),
        f"{kind}.embedding_length": ("uint32", config["hidden_size"]),
        f"{kind}.feed_forward_length": ("uint32", config["intermediate_size"]),
        f"{kind}.attention.head_count": ("uint32", config["num_attention_heads"]),
        f"{kind}.attention.head_count_kv": ("uint32", config["num_key_value_heads"]),
        f"{kind}.attention.layer_norm_rms_epsilon": ("float32", config["rms_norm_eps"]),
        f"{kind}.rope.freq_base": ("float32", config["rope_theta"]),
        "tokenizer.ggml.tokens": ("array", tokens),
        "tokenizer.ggml.token_type": ("array", [USER_DEFINED] * len(tokens)),
        "tokenizer.ggml.merges": ("array", ["a b"]),
        "tokenizer.ggml.bos_token_id": None,
        "tokenizer.ggml.eos_token_id": ("uint32", config["eos_token_id"]),
        "tokenizer.ggml.padding_token_id": None,
        "tokenizer.chat_template": ("string", template),
    }
    stored = load_file(folder / "model.safetensors")
    return gguf_world.write(path, kind, stored=stored, pre="qwen2", settings=settings)


@pytest.fixture(autouse=True)
def llama_cpp():
    pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install xllamacpp")


@contextlib.contextmanager
def served(path):
    """The address of a llama.cpp server for a GGUF file."""
    command = [sys.executable, "-c", SERVER, path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_greedy_answers_are_those_of_this_package_token_for_token(tmp_path):
    run, folder = interop_world.ledger_run(tmp_path, "prompt")
    path = gguf_of(folder, tmp_path / "policy.gguf")
    questions = interop_world.ledger_questions()[:5]
    rows = [(question, budget) for question in questions for budget in BUDGETS]
    with served(path) as url:
        responses = [ASK["ask"](url, folder, question, budget) for question, budget in rows]
    expected, _ = interop_world.ours(run, *zip(*rows))
    assert [list(response.tokens) for response in responses] == expected
    for response, (_, budget) in zip(responses, rows):
        assert len(response.thinking) <= budget


@pytest.mark.slow
@pytest.mark.parametrize("name", ["native", "think_answer"])
def test_the_chat_endpoint_ends_thinking_only_with_our_template(tmp_path, name, monkeypatch):
    tokenizer = hf_world.chat_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    exported = chat_template(tokenizer, FORMATS[name], words="Think for {budget} tokens.")
    ours = TEMPLATE["chat_template"](exported, FORMATS[name].think_open)
    monkeypatch.setattr(gguf_world, "TOKENS", [*gguf_world.TOKENS, "</think>"])
    monkeypatch.setattr(gguf_world, "TYPES", [*gguf_world.TYPES, USER_DEFINED])
    body = {
        "messages": [{"role": "user", "content": "hello 7"}],
        "chat_template_kwargs": {"budget": 0},
        "thinking_budget_tokens": 0,
        "reasoning_budget_message": "\nStop.\n",
        "max_tokens": 12,
        "temperature": 0,
    }
    thoughts = {}
    for kind, template in (("exported", exported), ("ours", ours)):
        settings = {"tokenizer.chat_template": ("string", template)}
        path = tmp_path / f"{kind}.gguf"
        gguf_world.write(path, "qwen2", pre="qwen2", settings=settings)
        with served(path) as url:
            reply = ASK["post"](url, "/v1/chat/completions", body)
        thoughts[kind] = reply["choices"][0]["message"].get("reasoning_content")
    assert thoughts == {"exported": None, "ours": "Stop.\n"}
