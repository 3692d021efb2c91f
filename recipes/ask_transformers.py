"""Generates a response with an exported model in plain transformers, without bacr_jax.

`python recipes/ask_transformers.py --model HFDIR --budget 8 "question"` prints the response and its
number of tokens.
"""

import argparse

import torch
import transformers


def main() -> None:
    """Loads the model, generates a response to the question, and prints it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder that bacr_jax.export wrote")
    parser.add_argument("--budget", type=int, required=True, help="thinking tokens")
    parser.add_argument("question")
    arguments = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        arguments.model, trust_remote_code=True, dtype=torch.float32
    )
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": arguments.question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    found = model.eval().generate(**inputs, budget=arguments.budget)
    response = found[0, inputs["input_ids"].shape[1] :]
    print(tokenizer.decode(response))
    print(f"[budget {arguments.budget}, {len(response)} tokens with the answer]")


if __name__ == "__main__":
    main()
