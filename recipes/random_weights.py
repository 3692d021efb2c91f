"""Creates a Hugging Face folder with the architecture of Qwen2.5-0.5B-Instruct and random weights.

`python recipes/random_weights.py --tokenizer DIR --out HFDIR` writes the model with transformers
and torch, in bfloat16 and with tied embeddings. The folder also contains the tokenizer.
"""

import argparse
from pathlib import Path

import torch
import transformers

# From config.json of Qwen/Qwen2.5-0.5B-Instruct.
SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


def main() -> None:
    """Writes the model and the tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True, help="folder with Qwen2.5's tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**SHAPE, dtype="bfloat16")
    model = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.tokenizer)
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    print(f"{model.num_parameters():,} parameters in {arguments.out}")


if __name__ == "__main__":
    main()
