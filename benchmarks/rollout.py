"""Measures the throughput of rollouts, compared with transformers and with simpler schedulers.

    python benchmarks/rollout.py [--rounds 5] [--record FILE]
    python benchmarks/rollout.py --model FOLDER                only (a), on these weights

Three comparisons run on a CPU with one thread, on the same weights. Both sides are warmed up, and
the results are medians over the rounds (decoding.py measures a GPU):

(a) Sampling a fixed number of tokens, compared with `generate` of transformers with its default
    cache and with its static cache (needs torch, the `parity` extra).
(b) Budgets from the paper's truncated normal distribution (scaled to the width): slots that are
    refilled as soon as a row ends, compared with static batches that run until their longest row
    ends.
(c) Answers at M cuts that share the KV cache of their trunk, compared with prefilling each prefix
    again.

The last line is one JSON object: vs_hf_best, occupancy, refill_vs_static, branches_vs_reprefill,
tokens_per_s.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import record


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--model", type=Path, help="Hugging Face folder, for (a) alone")
    parser.add_argument(
        "--products", help="16-bit type of our weight products, and of all that transformers does"
    )
    parser.add_argument("--without-transformers", action="store_true", help="skip (a)")
    record.add_option(parser)
    return parser.parse_args()


def time_jobs(jobs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Returns each job's seconds by round. The jobs alternate, after one warm-up call each."""
    for job in jobs.values():
        job()
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            time.sleep(0.1)
            started = time.perf_counter()
            job()
            seconds[name].append(time.perf_counter() - started)
    for name, taken in seconds.items():
        spread = " ".join(f"{s:.3f}" for s in sorted(taken))
        print(f"  {name:34} median {statistics.median(taken):.3f} s   ({spread})", flush=True)
    return seconds


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Returns the median of each job's seconds."""
    return {name: statistics.median(values) for name, values in seconds.items()}


class World:
    """A random policy that never closes its thinking, so that the budgets determine all lengths."""

    def __init__(self, shape, params, dtype, products=None):
        import numpy as np

        from bacr_jax.prompts.decode_rules import decode_rules

        class Never:
            next_state = np.stack([np.zeros(shape.vocab_size, int), np.ones(shape.vocab_size, int)])
            opens = np.zeros((2, shape.vocab_size), bool)

        allowed = np.ones(shape.vocab_size, bool)
        allowed[:4] = False
        self.shape, self.params, self.dtype = shape, params, dtype
        self.products = products
        self.rules = decode_rules(
            allowed_tokens=allowed,
            eos_ids=[1],
            think_close=Never,
            answer_close=Never,
            forced_suffix=[2, 3],
            natural_suffix=[3],
        )

    def prompts(self, rows, width, seed=0):
        """Returns random prompts of equal length."""
        import numpy as np

        from bacr_jax.types import Prompts

        tokens = np.random.default_rng(seed).integers(4, self.shape.vocab_size, (rows, width))
        lengths = np.full(rows, width)
        return Prompts(tokens.astype(np.int32), lengths, np.zeros(rows, int), lengths)

    def spec(self, **settings):
        """Returns the rollout settings of this policy."""
        from bacr_jax.rollout import RolloutSpec

        return RolloutSpec(
            self.shape, None, dtype=self.dtype, product_dtype=self.products, **settings
        )

    def engine(self, prompts, spec):
        """Returns a decoding engine whose steps the benchmark calls itself."""
        import jax

        from bacr_jax.rollout import SamplingSetup, sampling_params
        from bacr_jax.rollout.engine import SlotDecoder

        return SlotDecoder(
            self.params,
            prompts,
            jax.random.key(0),
            SamplingSetup(spec, self.rules, sampling_params(1.0)),
        )

    def generate(self, prompts, budgets, cuts, spec, seed=0):
        """Samples a rollout."""
        import jax

        from bacr_jax.rollout import RolloutRequest, SamplingSetup, generate, sampling_params

        return generate(
            self.params,
            prompts,
            RolloutRequest(budgets, cuts),
            jax.random.key(seed),
            SamplingSetup(spec, self.rules, sampling_params(1.0)),
        )


def cpu_world(arguments, folder):
    import jax
    import jax.numpy as jnp

    from bacr_jax.export.policy_folder import save_policy
    from bacr_jax.model import kv_cache, qwen2
    from bacr_jax.model.hf.reading import load_policy
    from bacr_jax.model.sizes import Qwen2Config

    if arguments.model:
        shape, params = load_policy(folder)
    else:
        shape = Qwen2Config(
            vocab_size=arguments.vocab,
            hidden_size=arguments.width,
            intermediate_size=4 * arguments.width,
            num_layers=arguments.layers,
            num_heads=4,
            num_kv_heads=2,
            head_dim=arguments.width // 4,
            rope_theta=1e4,
            tie_embeddings=True,
        )
        params = qwen2.init(jax.random.key(0), shape)
        save_policy(folder, params, config=shape)
    products = jnp.dtype(arguments.products) if arguments.products else None
    decode = kv_cache.decode_params(
        params, dtype=jnp.float32, conditioned=False, product_dtype=products
    )
    return World(shape, decode, jnp.float32, products)


def against_transformers(arguments, world, folder):
    """Runs comparison (a): rows of a fixed length, compared with transformers."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    dtype = getattr(torch, arguments.products or "float32")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    prompts = world.prompts(arguments.rows, arguments.prompt)
    tokens = torch.tensor(prompts.tokens, dtype=torch.long)
    budgets = np.full(arguments.rows, arguments.new)
    spec = world.spec(
        max_thinking=arguments.new,
        answer_tokens=1,
        slots=arguments.rows,
        windows=arguments.windows,
    )

    def theirs(**settings):
        with torch.inference_mode():
            out = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=True,
                top_k=0,
                min_new_tokens=arguments.new,
                max_new_tokens=arguments.new,
                pad_token_id=0,
                eos_token_id=1,
                **settings,
            )
        assert out.shape[1] == arguments.prompt + arguments.new

    def ours():
        rollout = world.generate(prompts, budgets, np.zeros((arguments.rows, 0), int), spec)
        assert rollout.counters["tokens"] == arguments.rows * arguments.new

    print(f"(a) {arguments.rows} rows, prompt {arguments.prompt}, {arguments.new} new tokens")
    times = time_jobs(
        {
            "bacr_jax": ours,
            "transformers, default cache": theirs,
            "transformers, static cache": lambda: theirs(cache_implementation="static"),
        },
        arguments.rounds,
    )
    seconds = medians(times)
    mine = seconds.pop("bacr_jax")
    total = arguments.rows * arguments.new
    print(f"  {total / mine:,.0f} tokens/s; transformers {total / min(seconds.values()):,.0f}")
    best = min(seconds, key=seconds.__getitem__)
    result = {"vs_hf_best": seconds[best] / mine, "tokens_per_s": total / mine}
    ratios = {"vs_hf_best": (f"sampling, {best}", "sampling, bacr_jax")}
    return result, record.seconds(times, "sampling"), ratios


def against_static_batches(arguments, world):
    """Runs comparison (b): different budgets, compared with static batches without refill."""
    import jax
    import numpy as np

    from bacr_jax.curriculum import truncnorm_ppf

    rows, slots, scale = 4 * arguments.rows, arguments.rows, arguments.new / 4096
    low, high = 256 * scale, 4096 * scale
    shares = jax.random.uniform(jax.random.key(1), (rows,))
    drawn = truncnorm_ppf(shares, 1500 * scale, 512 * scale, low, high)
    budgets = np.round(np.asarray(drawn)).astype(np.int32)
    prompts = world.prompts(rows, arguments.prompt)
    spec = world.spec(
        max_thinking=arguments.new,
        answer_tokens=1,
        slots=slots,
        # Lengths are a sixteenth of the paper's, so a chunk of 64 tokens becomes a chunk of 4.
        chunk=4,
        windows=arguments.windows,
        refill=1 / 32,
    )
    nothing = np.zeros((rows, 0), int)
    kept = {}

    def refilled():
        kept["refilled"] = world.generate(prompts, budgets, nothing, spec).counters

    def static():
        for start in range(0, rows, slots):
            part = slice(start, start + slots)
            taken = jax.tree.map(lambda x: x[part], prompts)  # noqa: B023
            kept["static"] = world.generate(taken, budgets[part], nothing[part], spec).counters

    print(
        f"(b) {rows} rows in {slots} slots, budgets {budgets.min()}..{budgets.max()}, "
        f"mean {budgets.mean():.0f}"
    )
    times = time_jobs({"refilled": refilled, "static batches": static}, arguments.rounds)
    seconds = medians(times)
    occupancy = kept["refilled"]["occupancy"]
    print(
        f"  occupancy {occupancy:.3f}, of the last static batch {kept['static']['occupancy']:.3f}"
    )
    result = {
        "occupancy": occupancy,
        "refill_vs_static": seconds["static batches"] / seconds["refilled"],
    }
    measurements = record.seconds(times, "slots")
    measurements["slots, occupancy"] = record.measurement([occupancy], "share", "higher", True)
    return result, measurements, {"refill_vs_static": ("slots, static batches", "slots, refilled")}


def against_prefilling_again(arguments, world, num_cuts=4, answer=16):
    """Runs comparison (c): answers at M cuts on a shared cache, compared with prefilling again."""
    import jax
    import numpy as np

    from bacr_jax.rollout import RolloutRequest
    from bacr_jax.types import Prompts

    rows, new = arguments.rows, arguments.new
    prompts = world.prompts(rows, arguments.prompt)
    cuts = np.tile(new * np.arange(1, num_cuts + 1) // num_cuts, (rows, 1))
    spec = world.spec(max_thinking=new, answer_tokens=answer, slots=rows, windows=1)
    engine = world.engine(prompts, spec)
    every = np.arange(rows)
    budgets = np.full(rows, new, np.int32)
    engine.prefill(RolloutRequest(budgets, cuts).complete(spec), every, every)
    for _ in range(-(-new // spec.chunk)):
        engine.decode()
    trunk = engine.tokens()

    def shared():
        opened = engine.open_branches(every, cuts)
        total, steps = engine.answer_steps
        for start in range(0, total, steps):
            opened = engine.decode_branches(opened, start)
        jax.block_until_ready(opened.state)
        assert int(opened.state.sampled.sum()) == rows * num_cuts * answer

    suffix = np.asarray(world.rules.forced_suffix)

    def again():
        for cut in cuts[0]:
            prefix = trunk[:, : arguments.prompt + cut]
            tokens = np.concatenate([prefix, np.tile(suffix, (rows, 1))], axis=1)
            lengths = np.full(rows, tokens.shape[1])
            text = Prompts(tokens, lengths, lengths * 0, lengths)
            short = world.spec(max_thinking=answer, answer_tokens=1, slots=rows, windows=1)
            rollout = world.generate(text, np.full(rows, answer), np.zeros((rows, 0), int), short)
            assert rollout.counters["tokens"] == rows * answer

    print(f"(c) {rows} trunks of {new} tokens, {num_cuts} answers of {answer} tokens each")
    times = time_jobs({"shared cache": shared, "prefilled again": again}, arguments.rounds)
    seconds = medians(times)
    result = {"branches_vs_reprefill": seconds["prefilled again"] / seconds["shared cache"]}
    ratios = {"branches_vs_reprefill": ("answers, prefilled again", "answers, shared cache")}
    return result, record.seconds(times, "answers"), ratios


def main() -> None:
    arguments = parse()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["OMP_NUM_THREADS"] = "1"
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_multi_thread_eigen=false"
    parts = []
    with tempfile.TemporaryDirectory() as parent:
        folder = arguments.model or os.path.join(parent, "model")
        world = cpu_world(arguments, folder)
        if not arguments.without_transformers:
            parts.append(against_transformers(arguments, world, folder))
    if not arguments.model:
        parts.append(against_static_batches(arguments, world))
        parts.append(against_prefilling_again(arguments, world))
    result: dict[str, float] = {}
    measurements: dict[str, dict] = {}
    ratios: dict[str, tuple[str, str]] = {}
    for values, measured, fractions in parts:
        result |= values
        measurements |= measured
        ratios |= fractions
    record.write(arguments, measurements, ratios)
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    main()
