"""The folder is what readers of Hugging Face folders expect, says where it came from, or is not."""

import hashlib
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import gguf_world
from bacr_gguf import folder
from bacr_gguf.container import GgufError
from bacr_jax.model.hf import hf_config, reading
from bacr_jax.prompts.tokenizers import load_tokenizer


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    place = tmp_path_factory.mktemp("gguf")
    path = gguf_world.write(place / "m.gguf", "qwen2", pre="qwen2", quantised="Q8_0")
    held = folder.write(path, place / "out")
    return path, place / "out", held


def test_our_reader_takes_its_shape_weights_and_tokenizer(made):
    _, out, _ = made
    config, params = reading.load_policy(out)
    assert (config.hidden_size, config.num_kv_heads, config.max_positions) == (64, 2, 512)
    stored = load_file(out / "model.safetensors")
    np.testing.assert_array_equal(params["embed"], stored["model.embed_tokens.weight"])
    tokenizer = load_tokenizer(out, where="test")
    assert len(tokenizer) == len(gguf_world.TOKENS) - 1
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    talk = [{"role": "user", "content": "hello"}]
    asked = tokenizer.apply_chat_template(talk, tokenize=False)
    assert asked == "<|im_start|>hello<|im_end|><|im_start|>"
    ids = [gguf_world.TOKENS.index(one) for one in ("<|im_start|>", "hello", "<|im_end|>")]
    assert tokenizer(asked).input_ids == [*ids, ids[0]]


def test_its_files_agree_on_special_ids(made):
    _, out, _ = made
    expected = {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
    assert json.loads((out / "generation_config.json").read_text()) == expected
    config = json.loads((out / "config.json").read_text())
    assert config.items() >= expected.items() and config["torch_dtype"] == "float32"


def test_the_card_says_where_it_came_from(made):
    path, out, held = made
    assert held == ("Qwen2ForCausalLM in float32, dequantised from tensors of Q8_0 (15), F32 (11)")
    card = (out / "README.md").read_text()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert card.startswith("---\nlibrary_name: transformers\n") and "license: apache-2.0" in card
    # What the file says can't break out of its line.
    assert "\n# Tiny `model`\\nof nobody\n" in card
    assert all(words in card for words in (held, digest, "`m.gguf`", "`qwen2`", "SHA-256"))


def test_bfloat16_takes_half_the_room(made, tmp_path):
    path, out, _ = made
    assert "in bfloat16" in folder.write(path, tmp_path / "half", dtype="bfloat16")
    sizes = [(where / "model.safetensors").stat().st_size for where in (tmp_path / "half", out)]
    assert 0.5 < sizes[0] / sizes[1] < 0.52
    assert hf_config.read_hf_config(tmp_path / "half") == hf_config.read_hf_config(out)


def test_a_base_model_has_no_template(tmp_path):
    said = {"tokenizer.chat_template": None, "general.name": None, "general.license": None}
    path = gguf_world.write(tmp_path / "m.gguf", settings=said)
    folder.write(path, tmp_path / "out")
    assert not (tmp_path / "out/chat_template.jinja").exists()
    assert "license unknown" in (tmp_path / "out/README.md").read_text()


def test_what_is_there_is_left_as_it_is(made):
    path, out, _ = made
    before = sorted(one.stat().st_mtime_ns for one in out.iterdir())
    with pytest.raises(ValueError, match="already exists; use the name of a new folder"):
        folder.write(path, out)
    assert sorted(one.stat().st_mtime_ns for one in out.iterdir()) == before


def test_nothing_is_left_of_a_file_that_turns_out_damaged(tmp_path):
    stored = gguf_world.weights() | {"model.norm.weight": np.full(64, np.nan, np.float32)}
    path = gguf_world.write(tmp_path / "m.gguf", stored=stored)
    with pytest.raises(GgufError, match=r"output_norm.weight' contains NaN"):
        folder.write(path, tmp_path / "deep/out")
    assert list((tmp_path / "deep").iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_nothing_is_left_of_an_interrupted_import(tmp_path, monkeypatch, error):
    def stopped(path, tensors):
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(folder, "write_file", stopped)
    path = gguf_world.write(tmp_path / "m.gguf")
    with pytest.raises((KeyboardInterrupt, ValueError), match="No space|^$"):
        folder.write(path, tmp_path / "out")
    assert [one.name for one in tmp_path.iterdir()] == ["m.gguf"]


def test_what_ends_a_turn_is_an_end_beside_eos(tmp_path):
    """As Llama 3's first file has it: eos ends a text, and eot a turn."""
    eot, eom = (gguf_world.TOKENS.index(one) for one in ("<|im_start|>", "<think>"))
    ids = {"eot_token_id": ("uint32", eot), "eom_token_id": ("uint32", eom)}
    settings = {f"tokenizer.ggml.{name}": value for name, value in ids.items()}
    folder.write(gguf_world.write(tmp_path / "m.gguf", settings=settings), tmp_path / "out")
    read = lambda name: json.loads((tmp_path / "out" / name).read_text())
    assert read("generation_config.json")["eos_token_id"] == [0, eot, eom]
    assert read("config.json")["eos_token_id"] == 0
    assert not any(
        name.startswith("eo") for name in read("tokenizer_config.json") if name[2] != "s"
    )
    assert load_tokenizer(tmp_path / "out", where="test").turn_ends == (0, eot, eom)


def test_an_end_of_turn_that_is_no_token_is_refused(tmp_path):
    settings = {"tokenizer.ggml.eot_token_id": ("uint32", 10**6)}
    with pytest.raises(GgufError, match=r"eot_token_id' is 1000000, which is not the id"):
        folder.write(gguf_world.write(tmp_path / "m.gguf", settings=settings), tmp_path / "out")


def test_a_tied_folder_has_one_matrix_for_both(tmp_path):
    stored = gguf_world.weights("qwen2", tied=False)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
    path = gguf_world.write(tmp_path / "m.gguf", "qwen2", pre="qwen2", stored=stored)
    folder.write(path, tmp_path / "out", tie=True)
    config, params = reading.load_policy(tmp_path / "out")
    assert config.tie_embeddings and "lm_head" not in params
    np.testing.assert_array_equal(params["embed"], stored["model.embed_tokens.weight"])
