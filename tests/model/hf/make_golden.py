"""Makes golden/: tiny folders of every family and what transformers computes from them.

    python tests/model/hf/make_golden.py

Needs torch (the `parity` extra). The tests read the files without it. Weights are random, scaled so
that logits differ clearly and greedy decoding has no near ties.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from bacr_jax.config import ConditioningConfig
from bacr_jax.export import policy_folder
from bacr_jax.model import budget
from bacr_jax.model.hf import hf_config, reading

GOLDEN = Path(__file__).parent / "golden"
ROWS, WIDTH, NEW = 3, 12, 64
LENGTHS = (12, 7, 3)
BUDGETS = (256, 1000, 4096)


def random_model(seed: int, family: str = "Qwen2", **shape) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        bos_token_id=1,
        # never sampled: rows of the embedding that belong to no token
        eos_token_id=None,
        pad_token_id=0,
        **shape,
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, weight in model.named_parameters():
        weight.data = torch.randn_like(weight) * 0.35 + (1.0 if "norm" in name else 0.0)
    return model


def left_padded(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    padded, mask = np.zeros_like(tokens), np.zeros_like(tokens)
    for row, length in enumerate(LENGTHS):
        padded[row, WIDTH - length :] = tokens[row, :length]
        mask[row, WIDTH - length :] = 1
    return padded, mask


def greedy(model, row: np.ndarray) -> np.ndarray:
    out = model.generate(torch.tensor(row[None]), max_new_tokens=NEW, do_sample=False)
    return out[0, len(row) :].numpy()


def answers(model, vocab: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(2, vocab, (ROWS, WIDTH))
    right = (np.arange(WIDTH) < np.array(LENGTHS)[:, None]).astype(np.int64)
    left, left_mask = left_padded(tokens)
    positions = np.maximum(left_mask.cumsum(1) - 1, 0)
    with torch.no_grad():
        of = lambda ids, **k: model(torch.tensor(ids), **k).logits.float().numpy()
        return {
            "tokens": tokens,
            "lengths": np.array(LENGTHS),
            "logits": of(tokens),
            "right": of(tokens * right, attention_mask=torch.tensor(right)),
            "left_tokens": left,
            "left": of(
                left, attention_mask=torch.tensor(left_mask), position_ids=torch.tensor(positions)
            ),
            "greedy": np.stack(
                [greedy(model, tokens[row, :length]) for row, length in enumerate(LENGTHS)]
            ),
        }


def old_style(folder: Path) -> None:
    """config.json as the released Qwen2.5 folders have it."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    rope = raw.pop("rope_parameters")
    raw |= {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    raw["torch_dtype"] = raw.pop("dtype")
    for key in ("layer_types", "pad_token_id"):
        raw.pop(key)
    path.write_text(json.dumps(raw, indent=2) + "\n")


def conditioned(params, config, source: Path) -> dict[str, np.ndarray]:
    """What the exported PyTorch file computes with a budget module that does something."""
    how = ConditioningConfig(sharing="per_layer", gate="sigmoid_normed", gate_bias=-1.0)
    module = budget.init(jax.random.key(0), how, width=32, layers=2)
    module["w2"] = 0.1 * jax.random.normal(jax.random.key(1), module["w2"].shape)
    module["gate"] = 0.3 * jax.random.normal(jax.random.key(2), module["gate"].shape)
    out = GOLDEN / "conditioned"
    policy_folder.save_policy(
        out,
        {**params, "budget": module},
        config=config,
        budget=policy_folder.BudgetInput(hf_config.BudgetModule(how, 4096)),
        source=source,
    )
    told = AutoModelForCausalLM.from_pretrained(
        out, trust_remote_code=True, dtype=torch.float32
    ).eval()
    tokens = np.random.default_rng(1).integers(2, config.vocab_size, (ROWS, WIDTH))
    with torch.no_grad():
        logits = told(torch.tensor(tokens), budget=torch.tensor(BUDGETS)).logits.numpy()
    # The code is in the package; a second copy here could only go stale.
    (out / "modeling_bacr.py").unlink()
    return {"tokens": tokens, "budgets": np.array(BUDGETS), "logits": logits}


def others() -> None:
    """The other families: norms per head and a head width of their own; llama3's frequencies."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    base = {"rope_type": "default", "rope_theta": 1e6}
    scaled = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    for seed, family, shape in (
        (2, "Qwen3", {"head_dim": 12, "tie_word_embeddings": True, "rope_parameters": base}),
        (3, "Llama", {"rope_parameters": scaled}),
    ):
        model = random_model(seed, family, vocab_size=59, **heads, **shape)
        model.save_pretrained(GOLDEN / family.lower())
        np.savez_compressed(GOLDEN / f"{family.lower()}.npz", **answers(model, 59))


def main() -> None:
    shutil.rmtree(GOLDEN, ignore_errors=True)
    GOLDEN.mkdir()
    os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp()
    theta = lambda base: {"rope_type": "default", "rope_theta": base}
    tied = random_model(
        0,
        vocab_size=67,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rope_parameters=theta(1e6),
    )
    tied.to(torch.bfloat16).save_pretrained(GOLDEN / "tied")
    old_style(GOLDEN / "tied")
    # Read again: casting a live model to bfloat16 and back also rounds its rotary frequencies.
    tied = Qwen2ForCausalLM.from_pretrained(GOLDEN / "tied", dtype=torch.float32).eval()
    np.savez_compressed(GOLDEN / "tied.npz", **answers(tied, 67))
    untied = random_model(
        1,
        vocab_size=61,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=12,
        tie_word_embeddings=False,
        rope_parameters=theta(1e4),
    )
    untied.save_pretrained(GOLDEN / "untied", max_shard_size="30KB")
    np.savez_compressed(GOLDEN / "untied.npz", **answers(untied, 61))
    others()
    config, params = reading.load_policy(GOLDEN / "tied")
    np.savez_compressed(GOLDEN / "conditioned.npz", **conditioned(params, config, GOLDEN / "tied"))
    print(sum(p.stat().st_size for p in GOLDEN.rglob("*") if p.is_file()), "bytes")


if __name__ == "__main__":
    main()
