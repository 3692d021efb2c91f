"""Measures the seconds of a complete GRPO step, and of a BACR step with answers at four cuts.

    python benchmarks/step.py --model HFDIR --prompts FILE.jsonl [--threads 1] [--record FILE]

Each line of FILE.jsonl has a `prompt`, of which the first 32 tokens are used (shorter prompts are
repeated). A step samples G responses of exactly 128 tokens (`--new`; the end token is never
sampled) for each of 8 prompts in float32. It computes advantages within each group and takes one
AdamW step with gradients clipped at 1. The reward is the fraction of even token ids. Its meaning
does not matter for the time, but rewards must differ between rows. The BACR step also samples and
trains on answers of 8 tokens at one, two, three and four quarters of the thinking. These share the
trunks' KV cache in sampling, and the trunks' forward pass in the update.

The last line is one JSON object of medians: step_s, generate_s, update_s, bacr_step_s.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import record

PROMPTS, PROMPT, NEW, CUTS, ANSWER = 8, 32, 128, 4, 8
# Maximum number of layers for which the layers are unrolled. Larger models use a scan over layers,
# and recompute them in the backward pass.
MOST_UNROLLED = 8
# Number of micro-batches per update. The activations of a few rows fit into a core's cache, while
# the activations of 64 rows do not.
MICRO_BATCHES = 16
# Tokens per micro-batch of a large model, whose weights do not fit into the cache and are read once
# per micro-batch. Its micro-batches have no padding, and contain the prompt of a group only once
# (train.padding_free).
TOKENS_OF_LARGE = 640


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, type=Path, help="a small Hugging Face folder")
    parser.add_argument("--prompts", required=True, type=Path, help="JSONL with a key prompt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new", type=int, default=NEW, help="tokens of an answer")
    parser.add_argument("--products", help="16-bit type of weight products (model.product_dtype)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument(
        "--on-demand",
        action="store_true",
        help="instead: a step of each kind for each line on the standard input, seconds as JSON",
    )
    record.add_option(parser)
    return parser.parse_args()


class Step:
    """A policy with its prompts, which can be called to run a GRPO step or a BACR step."""

    def __init__(self, arguments: argparse.Namespace):
        import jax
        import jax.numpy as jnp
        import numpy as np

        from bacr_jax.config import LossConfig, OptimizerConfig, TrainConfig
        from bacr_jax.learner.optimizer import policy_optimizer
        from bacr_jax.learner.spec import LearnerSpec
        from bacr_jax.learner.train_step import init_state
        from bacr_jax.learner.updates import Updates
        from bacr_jax.model import kv_cache
        from bacr_jax.model.hf.reading import load_policy
        from bacr_jax.prompts.decode_rules import decode_rules
        from bacr_jax.prompts.tokenizers import load_tokenizer
        from bacr_jax.rollout import RolloutSpec
        from bacr_jax.types import Prompts

        shape, params = load_policy(arguments.model)
        tokenizer = load_tokenizer(arguments.model, where="--model")
        lines = arguments.prompts.read_text().splitlines()[:PROMPTS]
        ids = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]
        tokens = np.array([(row * PROMPT)[:PROMPT] for row in ids], np.int32)
        tokens = np.repeat(tokens, arguments.group, axis=0)
        self.rows, self.group, v = len(tokens), arguments.group, shape.vocab_size
        self.new, self.is_large = arguments.new, shape.num_layers > MOST_UNROLLED
        lengths = np.full(self.rows, PROMPT, np.int32)
        self.prompts = Prompts(tokens, lengths, 0 * lengths, lengths)

        class Never:
            next_state = np.stack([np.zeros(v, int), np.ones(v, int)])
            opens = np.zeros((2, v), bool)

        end = tokenizer.eos_token_id
        allowed = (np.arange(v) < len(tokenizer)) & (np.arange(v) != end)
        self.rules = decode_rules(
            allowed_tokens=allowed,
            eos_ids=[end],
            think_close=Never,
            answer_close=Never,
            forced_suffix=[int(tokens[0, 0]), int(tokens[0, 1])],
            natural_suffix=[int(tokens[0, 1])],
        )
        products = jnp.dtype(arguments.products) if arguments.products else None
        self.rollout = RolloutSpec(
            shape,
            None,
            product_dtype=products,
            max_thinking=self.new,
            answer_tokens=ANSWER,
            slots=self.rows,
            windows=4,
            group_size=arguments.group,
        )
        self.learner = LearnerSpec(
            model=shape,
            conditioning=None,
            loss=LossConfig(entropy_coef=0.0, aggregate="token_mean"),
            value=None,
            b_max=self.new,
            scan=self.is_large,
            remat="full" if self.is_large else "none",
            product_dtype=products,
            chunk=2048,
        )
        settings = OptimizerConfig(learning_rate=1e-5, warmup_steps=0, schedule="constant")
        self.tx = policy_optimizer(settings, 100)
        self.state = init_state(params, None, self.tx, self.tx)
        parts = (
            {"micro_batch_tokens": TOKENS_OF_LARGE, "padding_free": True}
            if self.is_large
            else {"micro_batch_rows": self.rows // MICRO_BATCHES}
        )
        self.updates = Updates(
            self.learner,
            TrainConfig(minibatches=1, **parts),
            self.tx,
            self.tx,
            self.rules.allowed_tokens,
        )
        self.decode = jax.jit(
            lambda p: kv_cache.decode_params(
                p, dtype=jnp.float32, conditioned=False, product_dtype=products
            )
        )
        self.steps = 0

    def __call__(self, num_cuts: int) -> tuple[float, float]:
        """Runs one step and returns the seconds of sampling and of the update."""
        import jax
        import jax.numpy as jnp
        import numpy as np

        from bacr_jax import advantages
        from bacr_jax.learner.batch import make_batch
        from bacr_jax.rollout import RolloutRequest, SamplingSetup, generate, sampling_params

        started = time.perf_counter()
        self.steps += 1
        cuts = self.new * np.arange(1, num_cuts + 1) // max(num_cuts, 1)
        cuts = np.broadcast_to(cuts, (self.rows, num_cuts))
        rollout = generate(
            self.decode(self.state.policy),
            self.prompts,
            RolloutRequest(np.full(self.rows, self.new), cuts),
            jax.random.key(self.steps),
            SamplingSetup(self.rollout, self.rules, sampling_params(1.0)),
        )
        sampled = time.perf_counter()
        trunks, branches = rollout.trunks, rollout.branches
        assert (trunks.sampled == self.new).all() and (branches.sampled == ANSWER).all()
        rewards = (trunks.tokens[:, PROMPT:] % 2 == 0).mean(1).astype(np.float32)
        grouped = jnp.asarray(rewards.reshape(-1, self.group))
        advantage = np.asarray(advantages.grpo_advantage(grouped)).reshape(-1, 1)
        batch = make_batch(
            self.prompts,
            trunks,
            branches,
            cuts=cuts,
            thinking_advantages=np.broadcast_to(advantage, (self.rows, self.new)),
            answer_advantages=np.broadcast_to(advantage, (self.rows, num_cuts)),
            value_targets=np.broadcast_to(rewards[:, None], (self.rows, num_cuts)),
        )
        self.state, metrics = self.updates(self.state, batch)
        assert np.isfinite(float(metrics["loss/total"])) and float(metrics["policy/skipped"]) == 0
        return sampled - started, time.perf_counter() - sampled


def main() -> None:
    arguments = parse()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    if arguments.threads == 1:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    step = Step(arguments)
    if arguments.on_demand:
        for _ in sys.stdin:
            taken = {"step_s": sum(step(0)), "bacr_step_s": sum(step(CUTS))}
            print(json.dumps(taken), flush=True)
        return
    found: dict[int, list[tuple[float, float]]] = {0: [], CUTS: []}
    for index in range(arguments.warm_up + arguments.rounds):
        for num_cuts, seconds in found.items():
            taken = step(num_cuts)
            if index >= arguments.warm_up:
                seconds.append(taken)
    times = {
        "step_s": [sampling + update for sampling, update in found[0]],
        "generate_s": [sampling for sampling, _ in found[0]],
        "update_s": [update for _, update in found[0]],
        "bacr_step_s": [sampling + update for sampling, update in found[CUTS]],
    }
    result = {name: round(statistics.median(values), 4) for name, values in times.items()}
    record.write(arguments, record.seconds(times), {"bacr_over_step": ("bacr_step_s", "step_s")})
    ratio = result["bacr_step_s"] / result["step_s"]
    print(
        f"{step.rows} rows, {PROMPT} + {step.new} tokens, {arguments.threads} thread(s); "
        f"BACR / GRPO {ratio:.3f}"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
