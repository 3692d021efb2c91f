"""Writes small GGUF files in the layout of llama.cpp's converter, and damages files."""

import random

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import pre_tokenizers

from bacr_gguf.tokenizer import CONTROL, NORMAL, UNUSED, USER_DEFINED

WIDTH, MLP, LAYERS, HEADS, KV_HEADS, SIZE, MOST = 64, 96, 2, 4, 2, 16, 512
END, START, THINK = "<|im_end|>", "<|im_start|>", "<think>"
MERGES = ["Ġ Ġ", "Ċ Ċ", "Ġ 1", "1 2", "h e", "l l", "he ll", "hell o"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [END, START, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES), THINK, "[PAD]"]
TYPES = [CONTROL] * 2 + [NORMAL] * (len(TOKENS) - 4) + [USER_DEFINED, UNUSED]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
# Parts of tensor names: in transformers, and in GGUF.
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
}


def weights(kind="llama", *, tied=True, seed=0):
    """Returns random weights, by their names in transformers.

    Args:
      kind: architecture: llama, qwen2 or qwen3.
      tied: True if the model has no output head apart from the embedding matrix.
    """
    q, kv = HEADS * SIZE, KV_HEADS * SIZE
    layer = {
        "input_layernorm.weight": (WIDTH,),
        "self_attn.q_proj.weight": (q, WIDTH),
        "self_attn.k_proj.weight": (kv, WIDTH),
        "self_attn.v_proj.weight": (kv, WIDTH),
        "self_attn.o_proj.weight": (WIDTH, q),
        "post_attention_layernorm.weight": (WIDTH,),
        "mlp.gate_proj.weight": (MLP, WIDTH),
        "mlp.up_proj.weight": (MLP, WIDTH),
        "mlp.down_proj.weight": (WIDTH, MLP),
    }
    if kind == "qwen2":
        layer |= {f"self_attn.{x}_proj.bias": (n,) for x, n in (("q", q), ("k", kv), ("v", kv))}
    if kind == "qwen3":
        layer |= {f"self_attn.{x}_norm.weight": (SIZE,) for x in "qk"}
    shapes = {"model.embed_tokens.weight": (len(TOKENS), WIDTH), "model.norm.weight": (WIDTH,)}
    for i in range(LAYERS):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    if not tied:
        shapes["lm_head.weight"] = (len(TOKENS), WIDTH)
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def gguf_name(name):
    """Converts the name of a tensor in transformers to its name in GGUF."""
    for theirs, ours in NAMES.items():
        name = name.replace(f"{theirs}.", f"{ours}.")
    return name


def pairs_of_rows(matrix, heads):
    """Reorders the rows of a query or key matrix as llama.cpp stores them for the Llama family.

    In each head, row i of the first half is followed by row i of the second half.
    """
    halves = matrix.reshape(heads, 2, -1, *matrix.shape[1:])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


def write(
    path,
    kind="llama",
    *,
    stored=None,
    quantised="F32",
    kinds=None,
    settings=None,
    pre="smollm",
    alignment=32,
):
    """Writes a GGUF file with a whole model and returns its path.

    Args:
      kind: architecture, as in `weights`.
      stored: weights, by their names in transformers. None for random weights.
      quantised: type of the matrices, a name in `GGMLQuantizationType`.
      kinds: types of matrices that differ from `quantised`, by their names in transformers.
      settings: metadata to change, as {key: (type, value)}. A type such as uint32 is the name of a
        method of GGUFWriter without `add_`. None instead of the pair removes the key.
      pre: name of the pre-tokenizer.
      alignment: alignment of the tensors in bytes.
    """
    writer = GGUFWriter(path, kind)
    writer.add_custom_alignment(alignment)
    said = {
        f"{kind}.block_count": ("uint32", LAYERS),
        f"{kind}.context_length": ("uint32", MOST),
        f"{kind}.embedding_length": ("uint32", WIDTH),
        f"{kind}.feed_forward_length": ("uint32", MLP),
        f"{kind}.attention.head_count": ("uint32", HEADS),
        f"{kind}.attention.head_count_kv": ("uint32", KV_HEADS),
        f"{kind}.attention.layer_norm_rms_epsilon": ("float32", 1e-5),
        f"{kind}.rope.freq_base": ("float32", 10000.0),
        "general.name": ("string", "Tiny `model`\nof nobody"),
        "general.license": ("string", "apache-2.0"),
        "tokenizer.ggml.model": ("string", "gpt2"),
        "tokenizer.ggml.pre": ("string", pre),
        "tokenizer.ggml.tokens": ("array", TOKENS),
        "tokenizer.ggml.token_type": ("array", TYPES),
        "tokenizer.ggml.merges": ("array", MERGES),
        "tokenizer.ggml.bos_token_id": ("uint32", TOKENS.index(START)),
        "tokenizer.ggml.eos_token_id": ("uint32", TOKENS.index(END)),
        "tokenizer.ggml.padding_token_id": ("uint32", TOKENS.index(END)),
        "tokenizer.ggml.add_bos_token": ("bool", False),
        "tokenizer.chat_template": ("string", TEMPLATE),
    }
    for key, value in (said | (settings or {})).items():
        if value is not None:
            getattr(writer, f"add_{value[0]}")(key, value[1])
    for name, values in (weights(kind) if stored is None else stored).items():
        for part, heads in (("q_proj.weight", HEADS), ("k_proj.weight", KV_HEADS)):
            if kind == "llama" and name.endswith(part):
                values = pairs_of_rows(values, heads)
        of_matrix = (kinds or {}).get(name, quantised)
        how = GGMLQuantizationType[of_matrix if values.ndim == 2 else "F32"]
        writer.add_tensor(gguf_name(name), quantize(values, how), raw_dtype=how)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def damaged(content, seed):
    """Returns a damaged copy of a file's content.

    The end of the content is removed, some bytes are changed, removed or duplicated, or eight bytes
    become a large number.

    Args:
      seed: determines the kind and the position of the damage.
    """
    rng = random.Random(seed)
    # Three of four positions are limited to the start of the file, because it contains the header,
    # the only part that can be misread.
    place = lambda: rng.randrange(rng.choice([200, 1200, 8000, len(content)]))
    content = bytearray(content)
    match seed % 5:
        case 0:
            del content[place() :]
        case 1:
            for _ in range(rng.choice([1, 3, 20])):
                content[place()] = rng.randrange(256)
        case 2:
            at = place()
            large = rng.choice([2**16, 2**31 - 1, 2**40, 2**62, 2**63, 2**64 - 1])
            content[at : at + 8] = large.to_bytes(8, "little")
        case 3:
            at = place()
            del content[at : at + rng.choice([1, 4, 8, 100])]
        case 4:
            at, start = place(), place()
            content[at:at] = content[start : start + rng.choice([1, 8, 60])]
    return bytes(content)
