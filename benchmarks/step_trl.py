"""Runs GRPO steps with TRL. `step_beside_trl.py` starts it in an environment with TRL.

    python benchmarks/step_trl.py --make FOLDER
    python benchmarks/step_trl.py --make FOLDER --model MODEL
    python benchmarks/step_trl.py --model FOLDER/model --prompts FOLDER/prompts.jsonl

The first command writes a small model and prompts. The second one only writes prompts, for an
existing model. The third one runs one step for each line on stdin, and prints the seconds of the
step. The settings are the same as in `step.py`: float32, 8 prompts of 32 tokens, 8 responses of
exactly 128 tokens per prompt, one AdamW update with gradients clipped at 1, and no KL term. The
reward has no meaning, but it differs between responses.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

PROMPTS, PROMPT, NEW, VOCABULARY = 8, 32, 128, 2048


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--make", type=Path, help="only write model and prompts to this folder")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new", type=int, default=NEW, help="tokens of an answer")
    parser.add_argument("--bfloat16", action="store_true", help="TRL's bf16: autocast")
    parser.add_argument("--parts", type=int, default=1, help="parts of an update, accumulated")
    return parser.parse_args()


def make(folder: Path) -> None:
    """Writes a Qwen2 model with random weights, a word-level tokenizer, and prompts of 32 words.

    The model has 4 layers of width 128.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = ["<pad>", "<end>", *(f"w{i}" for i in range(VOCABULARY - 2))]
    own = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="<pad>", eos_token="<end>", unk_token="<pad>"
    )
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(shape)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_prompts(folder, [f" {word}" for word in words[2:]])


def make_prompts(folder: Path, model: Path) -> None:
    """Writes prompts of 32 words, each of which is a single token of the model's tokenizer."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    # Byte-level tokenizers represent a space by this character.
    words = [word[1:] for word in sorted(tokenizer.get_vocab()) if word.startswith("\u0120")]
    plain = [f" {word}" for word in words if word.isascii() and word.isalpha()]
    for prompt in write_prompts(folder, plain):
        assert len(tokenizer(prompt)["input_ids"]) == PROMPT, prompt


def write_prompts(folder: Path, words: list[str]) -> list[str]:
    import random

    draw = random.Random(0)
    lines = ["".join(draw.choices(words, k=PROMPT)) for _ in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": line}) + "\n" for line in lines)
    )
    return lines


def even_share(completion_ids: list[list[int]], **_: object) -> list[float]:
    assert len(set(map(len, completion_ids))) == 1
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def main() -> None:
    arguments = parse()
    if arguments.make is not None and arguments.model is None:
        make(arguments.make)
        return
    if arguments.make is not None:
        make_prompts(arguments.make, arguments.model)
        return
    import tempfile

    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    prompts = [json.loads(line) for line in arguments.prompts.read_text().splitlines()][:PROMPTS]
    answer = sys.stdout
    # Redirects TRL's own metrics to stderr, so that stdout only contains the seconds.
    sys.stdout = sys.stderr

    class OnDemand(TrainerCallback):
        """Waits for a line on stdin before each step, and prints the seconds of the step."""

        def on_step_begin(self, args, state, control, **_):
            if not sys.stdin.readline():
                raise SystemExit(0)
            self.started = time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            seconds = time.perf_counter() - self.started
            print(json.dumps({"step_s": seconds}), file=answer, flush=True)

    rows = PROMPTS * arguments.group
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=arguments.bfloat16,
        gradient_checkpointing=False,
        per_device_train_batch_size=rows // arguments.parts,
        gradient_accumulation_steps=arguments.parts,
        num_generations=arguments.group,
        max_completion_length=arguments.new,
        generation_kwargs={"min_new_tokens": arguments.new},
        temperature=1.0,
        beta=0.0,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=10_000,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
        processing_class=PreTrainedTokenizerFast.from_pretrained(
            arguments.model, padding_side="left"
        ),
        reward_funcs=even_share,
        args=settings,
        train_dataset=Dataset.from_list(prompts),
        callbacks=[OnDemand()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
