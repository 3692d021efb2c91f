"""Creates small Hugging Face folders, and computes logits and greedy text for comparison."""

import functools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.config import ConditioningConfig
from bacr_jax.errors import UserError
from bacr_jax.export import policy_folder
from bacr_jax.model import budget, kv_cache, qwen2
from bacr_jax.model.hf import reading
from bacr_jax.model.sizes import Qwen2Config, RopeScaling
from bacr_jax.rollout import DecodeSpec, trunks
from bacr_jax.types import Prompts

WEIGHTS = "model.safetensors"
TINY = Qwen2Config(37, 16, 24, 3, 4, 2, 4, rope_theta=1e4, tie_embeddings=True)
# A small model shape of each family, by model_type.
FAMILIES = {
    "qwen2": TINY,
    "qwen3": replace(TINY, head_dim=6, qkv_bias=False, qk_norm=True),
    "llama": replace(
        TINY,
        rms_norm_eps=1e-5,
        tie_embeddings=False,
        qkv_bias=False,
        # Both rotary frequencies of a head change: the first is interpolated, because it turns 2.5
        # times in 16 positions, and the second is divided by 8.
        rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16),
    ),
}


def random_params(config=TINY, seed=0, conditioning=None):
    """Returns random parameters that are far from the initial zeros and ones.

    Args:
      conditioning: settings of the budget module. None for a model without budget module.
    """
    make = lambda: qwen2.init(jax.random.key(0), config, conditioning=conditioning)
    rng = np.random.default_rng(seed)

    def leaf(path, like):
        centre = 1.0 if "norm" in jax.tree_util.keystr(path) else 0.0
        return jnp.asarray(centre + 0.3 * rng.standard_normal(like.shape, np.float32))

    return jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(make))


def tokenizer_json(ids):
    """Returns the JSON text of a minimal tokenizer with the given number of token ids."""
    vocab = {f"w{i}": i for i in range(ids)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model})


def chat_tokenizer():
    """Returns a tokenizer with a chat template, and one token per byte and three special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    found = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[2])
    found.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
    )
    return found


def make_folder(path, config=TINY, seed=0, **how):
    """Writes a Hugging Face folder with random weights and returns the parameters.

    Args:
      how: further arguments of `save_policy`.
    """
    params = random_params(config, seed)
    policy_folder.save_policy(path, params, config=config, **how)
    return params


def same(one, two):
    """Asserts that all leaves of two pytrees are exactly equal."""
    jax.tree.map(np.testing.assert_array_equal, one, two)


def refusal(folder):
    """Loads a folder that must be refused, and returns the error message, which is one line."""
    with pytest.raises(UserError) as caught:
        reading.load_policy(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit_config(folder, drop=(), **changes):
    """Removes keys from a folder's config.json, and sets other keys."""
    raw = json.loads((folder / "config.json").read_text())
    for key in drop:
        raw.pop(key, None)
    (folder / "config.json").write_text(json.dumps(raw | changes))


@functools.partial(jax.jit, static_argnames=("config",))
def _logits(params, tokens, *, config, **how):
    return qwen2.logits(params, qwen2.forward(params, tokens, config=config, **how))


def logits(params, tokens, config, **how):
    """Returns the logits of all positions as a NumPy array.

    Args:
      how: further arguments of `qwen2.forward`.
    """
    return np.asarray(_logits(params, jnp.asarray(tokens), config=config, **how))


def told_logits(params, tokens, budgets, config, conditioning, b_max, mask=None):
    """Returns the logits of a policy that receives the budget of each row as an embedding.

    Args:
      budgets: budget of each row, in tokens.
      b_max: largest budget, in tokens.
      mask: True for positions to which the embedding is added. None for all positions.
    """
    phi = budget.embed(
        params["budget"], jnp.asarray(budgets), conditioning=conditioning, b_max=b_max
    )
    conditioned = budget.Conditioned(phi, params["budget"]["gate"], mask, settings=conditioning)
    return logits(params, tokens, config, conditioned=conditioned)


def greedy(params, rows, config, new, phi=None, conditioning: ConditioningConfig | None = None):
    """Returns the greedy continuation of prompts, computed by prefill and cached decoding.

    Args:
      rows: token ids of each prompt, which are padded on the right.
      new: number of tokens to generate.
      phi: budget embedding of each row. None without budget.

    Returns:
      Generated token ids [rows, new].
    """
    lengths = np.array([len(row) for row in rows])
    width = int(lengths.max())
    tokens = np.stack([np.pad(row, (0, width - len(row))) for row in rows])
    zeros = jnp.zeros(len(rows), jnp.int32)
    prompts = Prompts(jnp.asarray(tokens), jnp.asarray(lengths), zeros, jnp.asarray(lengths))
    decoding = kv_cache.decode_params(params, dtype=jnp.float32, conditioned=phi is not None)
    spec = DecodeSpec(config, conditioning)
    prefilled = trunks.prefill_prompts(decoding, prompts, spec=spec, phi=phi)
    feed = jax.jit(
        lambda token, at, cache: trunks.feed_tokens(decoding, token, at, cache, spec=spec, phi=phi)
    )
    scores, generated = prefilled.logits, []
    cache = tuple(kv_cache.resize(layer, width + new) for layer in prefilled.cache)
    for step in range(new):
        token = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        generated.append(np.asarray(token))
        scores, cache = feed(token, jnp.asarray(lengths + step), cache)
    return np.stack(generated, axis=1)
