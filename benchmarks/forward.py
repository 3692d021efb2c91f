"""Measures tokens per second of the forward pass and the gradient, compared with transformers.

    python benchmarks/forward.py [--threads 2] [--rounds 9] [--record FILE]

Both libraries use the same fp32 weights, tokens, loss and number of threads, and alternate in one
process. The forward pass computes the logits of every token. The gradient is taken of the mean
next-token loss. Needs torch (the `parity` extra). The last line is one JSON object with
forward_vs_hf and train_vs_hf, our tokens per second divided by those for transformers (medians over
the rounds).
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import record


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--intermediate", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=8192)
    record.add_option(parser)
    return parser.parse_args()


def theirs(arguments: argparse.Namespace, folder: str) -> dict[str, Callable[[], object]]:
    """Creates a transformers model, saves it to `folder`, and returns its two jobs."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=arguments.vocab,
        hidden_size=arguments.width,
        intermediate_size=arguments.intermediate,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        tie_word_embeddings=True,
        use_cache=False,
    )
    model = Qwen2ForCausalLM(config).eval()
    model.save_pretrained(folder)
    tokens = torch.tensor(batch(arguments))

    def forward() -> object:
        with torch.inference_mode():
            return model(tokens).logits

    def train() -> object:
        model.zero_grad(set_to_none=True)
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

    return {"forward": forward, "train": train}


def ours(arguments: argparse.Namespace, folder: str) -> dict[str, Callable[[], object]]:
    """Loads our model from `folder` and returns its two jobs."""
    import jax
    import jax.numpy as jnp

    from bacr_jax.model import qwen2
    from bacr_jax.model.compute import Compute
    from bacr_jax.model.hf import reading
    from bacr_jax.model.logprobs import logprob_and_entropy, map_logits

    config, params = reading.load_policy(folder)
    tokens = jnp.asarray(batch(arguments), jnp.int32)
    # Equivalent to model.scan_layers=false and model.remat=none: unrolled layers, no recomputation.
    plain = Compute(scan=False, remat="none")
    states = lambda params: qwen2.forward(params, tokens, config=config, compute=plain)

    def loss(params: dict) -> jax.Array:
        hidden = states(params)[:, :-1].reshape(-1, config.hidden_size)
        lm_head, targets = qwen2.output_head(params), tokens[:, 1:].reshape(-1)
        # A single chunk, as in transformers. Smaller chunks save memory but take longer.
        return -map_logits(logprob_and_entropy, hidden, lm_head, targets, chunk=len(targets))[
            0
        ].mean()

    forward = jax.jit(lambda params: qwen2.logits(params, states(params)))
    gradient = jax.jit(jax.value_and_grad(loss))
    return {
        "forward": lambda: jax.block_until_ready(forward(params)),
        "train": lambda: jax.block_until_ready(gradient(params))[0],
    }


def batch(arguments: argparse.Namespace):
    import numpy as np

    shape = (arguments.rows, arguments.length)
    return np.random.default_rng(0).integers(0, arguments.vocab, shape)


def timed(job: Callable[[], object]) -> float:
    # Waits until the threads of the other library, which may still be spinning, have gone to sleep.
    time.sleep(0.2)
    started = time.perf_counter()
    job()
    return time.perf_counter() - started


def main() -> None:
    arguments = parse()
    # Both libraries choose their number of threads from the cores that the process may use.
    allowed = sorted(os.sched_getaffinity(0))[: arguments.threads]
    os.sched_setaffinity(0, allowed)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        sides = {"transformers": theirs(arguments, folder), "bacr_jax": ours(arguments, folder)}
    tokens = arguments.rows * arguments.length
    result: dict[str, object] = {}
    measurements: dict[str, dict] = {}
    ratios: dict[str, tuple[str, str]] = {}
    for job in ("forward", "train"):
        values = {name: jobs[job]() for name, jobs in sides.items()}  # also compiles and warms up
        if job == "train":
            print("loss:", ", ".join(f"{name} {float(v):.6f}" for name, v in values.items()))
        del values
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(arguments.rounds):
            for name, jobs in sides.items():
                seconds[name].append(timed(jobs[job]))
        measurements |= record.seconds(seconds, job)
        ratios[f"{job}_vs_hf"] = (f"{job}, transformers", f"{job}, bacr_jax")
        speed = {name: tokens / statistics.median(found) for name, found in seconds.items()}
        for name, value in speed.items():
            best = tokens / min(seconds[name])
            print(f"{job:8} {name:13} {value:9,.0f} tokens/s (best round {best:9,.0f})")
            result[f"{job}_tokens_per_s_{name}"] = round(value)
        result[f"{job}_vs_hf"] = round(speed["bacr_jax"] / speed["transformers"], 3)
    record.write(arguments, measurements, ratios)
    print(json.dumps({**result, "threads": arguments.threads}))


if __name__ == "__main__":
    main()
