"""Exports small policies, and writes bacr_jax's responses of each as references for the tests.

    python make_world.py OUT TOKENIZER

Must be run in an environment in which bacr_jax's dependencies are installed.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiles faster. The programs are small and run only once, so optimizing them does not pay off.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "support")]

import interop_world  # noqa: E402
from bacr_jax.config.cli import silence_orbax  # noqa: E402

# The head width must be one that vLLM's CPU attention supports.
HEADS = {"hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
# Architectures other than the ledger's Qwen2. For Qwen3, head_dim is larger than
# hidden_size / num_heads.
FAMILIES = {"qwen3": {**HEADS, "head_dim": 64}, "llama": HEADS}

# Covers every value of conditioning.budget_input, and of the keys of the budget embedding.
LEDGER = {
    "shared": ("embedding", {}),
    "per_layer": (
        "embedding",
        {"sharing": "per_layer", "input": "log", "gate": "tanh"},
    ),
    "response": (
        "embedding",
        {
            "positions": "response",
            "input": "normalised",
            "gate": "sigmoid_normed",
        },
    ),
    "both": ("both", {}),
    "prompt": ("prompt", {}),
    "none": ("none", {}),
}
BUDGETS = [0, 8, 16, 64, None]
QUESTIONS = 4
# Some budgets end within the tokens of Qwen's `</think>`, and `GRACE` sets a grace window in which
# truncation is delayed. Budgets are small, because Triton's interpreter is slow for the logits of a
# large vocabulary.
QWEN_BUDGETS = [0, 2, 3, 4, 5, 8]
GRACE = {"budget": {"min": 4, "max": 8, "grace": 4}, "rollout": {"answer_tokens": 6}}


def rows_of(run, questions, budgets):
    """Returns the prompt and response of every question at every budget."""
    rows = [(question, budget) for budget in budgets for question in questions]
    row_questions = [question for question, _ in rows]
    row_budgets = [budget for _, budget in rows]
    prompts = interop_world.asked(run, row_questions, row_budgets)
    responses, trunks = interop_world.ours(run, row_questions, row_budgets)
    lengths = prompts.lengths.tolist()
    return [
        {
            "question": question,
            "budget": budget,
            "prompt": prompts.tokens[i][: lengths[i]].tolist(),
            "response": responses[i],
            "close": int(trunks.close[i]),
        }
        for i, (question, budget) in enumerate(rows)
    ]


def main(out, tokenizer):
    """Writes the exported folders OUT/NAME/out, and the references OUT/reference.json."""
    from transformers import AutoTokenizer

    silence_orbax()
    reference = {}
    ledger = replace(interop_world.LEDGER, **HEADS)
    questions = interop_world.ledger_questions()[:QUESTIONS]
    for name, (budget_input, options) in LEDGER.items():
        (out / name).mkdir(parents=True)
        run, _ = interop_world.ledger_run(
            out / name, budget_input, shape=ledger, quiet=True, **options
        )
        reference[name] = rows_of(run, questions, BUDGETS)
    for name, widths in FAMILIES.items():
        (out / name).mkdir()
        run, _ = interop_world.family_run(out / name, name, **widths)
        reference[name] = rows_of(run, questions, BUDGETS)
    (out / "qwen").mkdir()
    qwen = replace(interop_world.QWEN, **HEADS)
    tokens = AutoTokenizer.from_pretrained(tokenizer)
    run, _ = interop_world.qwen_run(out / "qwen", tokens, {}, shape=qwen, **GRACE)
    reference["qwen"] = rows_of(run, ["What is 7 times 8?"], QWEN_BUDGETS)
    (out / "reference.json").write_text(json.dumps(reference))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
