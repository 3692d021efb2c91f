"""llama.cpp's tensors become those of transformers: names, shapes, order of rows, values."""

import gguf
import numpy as np
import pytest

import gguf_world
from bacr_gguf import container, weights
from bacr_gguf.container import GgufError
from bacr_jax.errors import UserError


def read(path, dtype="float32"):
    """Weights of a file by their names in transformers."""
    file = container.read(path)
    return {one.name: one.fetch() for one in weights.tensors(file, weights.hf_config(file), dtype)}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", weights.CLASSES)
def test_weights_come_back_as_they_were_before_the_file(tmp_path, kind, tied):
    before = gguf_world.weights(kind, tied=tied)
    after = read(gguf_world.write(tmp_path / "m.gguf", kind, stored=before))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_rows_of_queries_were_pairs_in_the_file(tmp_path):
    path = gguf_world.write(tmp_path / "m.gguf")
    stored = gguf.GGUFReader(path)
    (rows,) = (one.data for one in stored.tensors if one.name == "blk.0.attn_q.weight")
    found = read(path)["model.layers.0.self_attn.q_proj.weight"]
    half = gguf_world.SIZE // 2
    np.testing.assert_array_equal(found[:3], rows[:6:2])
    np.testing.assert_array_equal(found[half : half + 3], rows[1:6:2])


@pytest.mark.parametrize("how", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_weights_are_near_and_bfloat16_is_their_rounding(tmp_path, how):
    path = gguf_world.write(tmp_path / "m.gguf", quantised=how)
    before, exact, rounded = gguf_world.weights(), read(path), read(path, "bfloat16")
    errors = {"F16": 2e-3, "BF16": 2e-2, "Q8_0": 2e-2, "Q5_0": 0.2, "Q5_1": 0.2}
    for name, values in before.items():
        assert np.abs(exact[name] - values).max() < errors.get(how, 0.4)
        np.testing.assert_array_equal(rounded[name], exact[name].astype(rounded[name].dtype))


def test_blocks_of_256_are_dequantised_by_hand(tmp_path):
    """Q6_K: d x scale x (q - 32); Q4_K: d x scale x q - dmin x min, with q = 0x21 and scales 1."""
    d = np.float16(0.5).tobytes()
    q6 = bytes(192) + bytes([3] * 16) + d
    q4 = d + np.float16(0.25).tobytes() + bytes([1] * 8 + [0x11] * 4) + bytes([0x21] * 128)
    for name, block, expected in (("Q6_K", q6, [-48.0]), ("Q4_K", q4, [0.25, 0.75])):
        path = tmp_path / name
        path.write_bytes(b"before" + 3 * block)
        kind = gguf.GGMLQuantizationType[name]
        tensor = container.TensorEntry("t", (3, 256), kind, 6, 3 * len(block))
        found = weights.dequantised(path, tensor, np.float32)
        assert found.shape == (3, 256) and set(found.ravel()) == set(expected)


def test_config_says_the_shape(tmp_path):
    settings = {"qwen3.attention.key_length": ("uint32", 16), "general.x": ("string", "y")}
    file = container.read(gguf_world.write(tmp_path / "m.gguf", "qwen3", settings=settings))
    found = weights.hf_config(file)
    assert found["architectures"] == ["Qwen3ForCausalLM"] and found["model_type"] == "qwen3"
    assert (found["head_dim"], found["num_key_value_heads"], found["vocab_size"]) == (
        16,
        2,
        len(gguf_world.TOKENS),
    )
    assert found["rms_norm_eps"] == 1e-5 and found["tie_word_embeddings"]


@pytest.mark.parametrize("rotated", [None, 32])
@pytest.mark.parametrize("kind", weights.CLASSES)
def test_heads_may_be_wider_than_the_hidden_size_by_heads(tmp_path, monkeypatch, kind, rotated):
    """The converter writes no number of rotated dimensions for Qwen3, so it is the key's width."""
    monkeypatch.setattr(gguf_world, "SIZE", 32)
    before = gguf_world.weights(kind)
    settings = {
        f"{kind}.attention.key_length": ("uint32", 32),
        f"{kind}.attention.value_length": ("uint32", 32),
        f"{kind}.rope.dimension_count": rotated and ("uint32", rotated),
    }
    path = gguf_world.write(tmp_path / "m.gguf", kind, stored=before, settings=settings)
    assert weights.hf_config(container.read(path))["head_dim"] == 32
    after = read(path)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("general.architecture", ("string", "gemma3"), "'gemma3', .* one of llama, qwen2, qwen3"),
        ("llama.block_count", ("uint32", 0), "block_count' is 0, but must be above 0 and at most"),
        ("llama.block_count", ("uint32", 2**31), "but must be above 0 and"),
        ("llama.block_count", ("uint32", 1000), "fewer tensors than the model's number"),
        ("llama.block_count", ("string", "2"), "block_count' is '2', but must be of type int"),
        ("llama.block_count", None, "block_count' is null, but must be of type int"),
        ("llama.attention.head_count", ("uint32", 3), "are inconsistent"),
        ("llama.attention.head_count_kv", ("array", [2, 2]), "but must be of type int"),
        (
            "llama.attention.layer_norm_rms_epsilon",
            ("float32", np.nan),
            "is nan, but must be above 0",
        ),
        ("llama.rope.freq_base", ("float32", -1.0), "but must be above 0 and"),
        ("llama.rope.dimension_count", ("uint32", 8), "widths 16 and"),
        # Without its own entry, the width of a value is hidden size / number of heads.
        ("llama.attention.key_length", ("uint32", 32), r"widths 32 and \[16, 32\]"),
        ("llama.attention.value_length", ("uint32", 32), r"widths 16 and \[32, 16\]"),
        ("llama.rope.scaling.type", ("string", "yarn"), "'yarn', which is not supported"),
        ("llama.expert_count", ("uint32", 8), "8, which is not supported"),
        ("llama.attention.causal", ("bool", False), "causal' is false, but only models"),
        ("llama.attention.causal", ("uint32", 1), "causal' is 1, but must be of type bool"),
        ("llama.vocab_size", ("uint32", 7), "vocab_size' is 7, but the embedding has [0-9]+ rows"),
        ("llama.vocab_size", ("string", "7"), "vocab_size' is '7', but must be of type int"),
        ("llama.rope.scaling.factor", ("float32", 4.0), "factor' is 4.0, which is not supported"),
        ("llama.logit_scale", ("float32", 1.5), "logit_scale' is 1.5, which is not supported"),
        ("llama.attention.sliding_window", ("uint32", 8), "window' is 8, which is not supported"),
        ("llama.embedding_length", ("uint32", 128), "don't fit|has the shape"),
        (
            "llama.feed_forward_length",
            ("uint32", 64),
            r"has the shape \(64, 96\), .* model it has \(64, 64\)",
        ),
    ],
)
def test_another_model_or_shape_is_refused(tmp_path, key, value, words):
    if key == "general.architecture":
        path = gguf_world.write(tmp_path / "m.gguf", value[1], stored={})
    else:
        path = gguf_world.write(tmp_path / "m.gguf", settings={key: value})
    with pytest.raises(GgufError, match=words):
        read(path)


def test_nothing_said_is_fine(tmp_path):
    settings = {
        "llama.expert_count": ("uint32", 0),
        "llama.rope.scaling.type": ("string", "none"),
        "llama.rope.scaling.factor": ("float32", 1.0),
        "llama.attention.causal": ("bool", True),
        "llama.vocab_size": ("uint32", len(gguf_world.TOKENS)),
    }
    assert read(gguf_world.write(tmp_path / "m.gguf", settings=settings))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.norm.weight": None}, "'output_norm.weight' has the shape None"),
        (
            {"rope_freqs.weight": np.ones(8, np.float32)},
            "'rope_freqs.weight' has the shape .* None",
        ),
        ({"model.norm.weight": np.full(64, np.inf, np.float32)}, "after conversion to float32"),
    ],
)
def test_another_set_of_tensors_is_refused(tmp_path, change, words):
    stored = gguf_world.weights() | change
    stored = {name: values for name, values in stored.items() if values is not None}
    with pytest.raises(GgufError, match=words):
        read(gguf_world.write(tmp_path / "m.gguf", stored=stored))


def test_a_number_beyond_bfloat16_is_refused(tmp_path):
    stored = gguf_world.weights() | {"model.norm.weight": np.full(64, 3.4e38, np.float32)}
    path = gguf_world.write(tmp_path / "m.gguf", stored=stored)
    assert read(path)
    with pytest.raises(GgufError, match="after conversion to bfloat16"):
        read(path, "bfloat16")


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def untied(folder, change=lambda embedding: embedding, **kinds):
    """A file whose output matrix is made of the embedding."""
    stored = gguf_world.weights("qwen2", tied=False)
    stored[HEAD] = change(stored[EMBEDDING])
    kinds = {EMBEDDING: "Q4_0", HEAD: "Q8_0", **kinds}
    path = gguf_world.write(folder / "m.gguf", "qwen2", stored=stored, kinds=kinds)
    return container.read(path), stored[EMBEDDING]


@pytest.mark.parametrize(("finer", "coarser"), [(HEAD, EMBEDDING), (EMBEDDING, HEAD)])
def test_matrices_that_differ_by_quantisation_are_tied_to_the_finer_one(tmp_path, finer, coarser):
    file, embedding = untied(tmp_path, **{finer: "Q8_0", coarser: "Q4_0"})
    difference = weights.relative_difference(
        file.path, file.tensors["output.weight"], file.tensors["token_embd.weight"]
    )
    # Four bits: about a sixteenth of the largest of 32 normal values between two levels.
    assert 0.03 < difference < 0.12
    tied = weights.tied(file)
    assert "output.weight" not in tied.tensors
    assert weights.hf_config(tied)["tie_word_embeddings"]
    assert not weights.hf_config(file)["tie_word_embeddings"]
    values = weights.dequantised(file.path, tied.tensors["token_embd.weight"], np.float32)
    # Eight bits are closer than four ever are.
    assert np.linalg.norm(values - embedding) / np.linalg.norm(embedding) < 0.01


def test_an_output_matrix_of_its_own_is_not_tied(tmp_path):
    file, _ = untied(tmp_path, lambda embedding: embedding[::-1].copy())
    with pytest.raises(UserError, match="--tie: the output matrix .* differ by 1[34].%"):
        weights.tied(file)


def test_a_tied_file_is_not_tied_again(tmp_path):
    file = container.read(gguf_world.write(tmp_path / "m.gguf", "qwen2"))
    with pytest.raises(UserError, match="--tie: .* already uses its embedding as the output"):
        weights.tied(file)
