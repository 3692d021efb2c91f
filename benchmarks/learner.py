"""Measures the learner: speed of the one-pass gradient, memory of log-probabilities, and MFU.

    python benchmarks/learner.py [--rounds 5] [--rows 4] [--shape qwen2.5-1.5b] [--record FILE]

Three measurements:

* The gradient for a trunk of T thinking tokens with answers at the cuts b/4, b/2, 3b/4 and b. It is
  computed in one pass over trunk and branches, and as four separate sequences without padding. Both
  have the same target tokens and the same loss. They alternate in one process, and their gradients
  are compared.
* The temporary memory that XLA allocates for the gradient of the log-probabilities, computed in
  chunks and with all logits at once.
* On a GPU, a complete update (forward, backward, AdamW) of a 1.5B model in bfloat16 with 4,096
  positions per row, and its model FLOPs utilization (MFU, which does not count recomputation).

The last line is one JSON object: one_pass_vs_separate (separate time / one-pass time),
arithmetic_ratio (separate operations / one-pass operations, the upper bound of the speedup if both
run at the same FLOP rate), logprob_memory_ratio (chunked / full), tokens_per_s (positions of the
one-pass gradient, or of the update on a GPU), and on a GPU mfu.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import record
from bacr_jax import parallel
from bacr_jax.config import LossConfig, OptimizerConfig, ValueConfig
from bacr_jax.learner.batch import Batch
from bacr_jax.learner.objective import Minibatch, loss_normalizers, objective
from bacr_jax.learner.optimizer import policy_optimizer, value_optimizer
from bacr_jax.learner.spec import LearnerSpec
from bacr_jax.learner.train_step import init_state, train_step
from bacr_jax.model import logprobs, qwen2
from bacr_jax.model.sizes import Qwen2Config, preset

# Dense bfloat16 tensor-core peaks in TFLOP/s, from NVIDIA's data sheets (without sparsity).
PEAK_TFLOPS = {"A100": 312, "H100": 989, "H200": 989, "H800": 989, "A800": 312}
BRIDGE = 2


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--thinking", type=int, default=512)
    parser.add_argument("--answer", type=int, default=16, help="tokens of a branch")
    parser.add_argument("--cuts", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    # With 1,024 token ids, the output head has 7 % of the operations, as in Qwen2.5-7B.
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--shape", default="qwen2.5-1.5b", help="model of the GPU measurement")
    parser.add_argument("--gpu-rows", type=int, default=4, help="rows of 4,096 positions")
    record.add_option(parser)
    return parser.parse_args()


def make_batch(rows: int, prompt: int, thinking: int, cuts: int, answer: int, vocab: int) -> Batch:
    """Returns a batch of random rows of full length, with an answer at every cut."""
    rng = np.random.default_rng(0)
    ids = lambda *shape: rng.integers(0, vocab, shape).astype(np.int32)
    full = lambda x, *shape: np.full(shape, x, np.int32)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    at = np.ceil(thinking * np.arange(1, cuts + 1) / cuts).astype(np.int32)
    sampled = answer - BRIDGE
    return Batch(
        trunk=ids(rows, prompt + thinking),
        prompt_lengths=full(prompt, rows),
        question_start=full(0, rows),
        question_end=full(prompt, rows),
        sampled=full(thinking, rows),
        budgets=full(thinking, rows),
        cuts=np.tile(at, (rows, 1)),
        branches=ids(rows, cuts, answer),
        context=np.tile(prompt + at, (rows, 1)).astype(np.int32),
        forced=full(BRIDGE, rows, cuts),
        answered=full(sampled, rows, cuts),
        thinking_advantages=normal(rows, thinking),
        answer_advantages=normal(rows, cuts),
        value_targets=normal(rows, cuts),
        thinking_logprobs=np.zeros((rows, thinking), np.float32),
        answer_logprobs=np.zeros((rows, cuts, sampled), np.float32),
    )


def separate_loss(params: dict, batch: Batch, spec: LearnerSpec, normalizers: Any) -> jax.Array:
    """Computes the same loss with one sequence per cut.

    The targets of a sequence are the thinking tokens since the previous cut, and the answer.
    """
    prompt = batch.trunk.shape[1] - batch.thinking_advantages.shape[1]
    start, loss = 0, jnp.float32(0.0)
    cuts = np.ceil(
        batch.thinking_advantages.shape[1]
        * np.arange(1, batch.cuts.shape[1] + 1)
        / batch.cuts.shape[1]
    ).astype(int)
    for j, cut in enumerate(cuts):
        tokens = jnp.concatenate([batch.trunk[:, : prompt + cut], batch.branches[:, j]], axis=1)
        hidden = qwen2.forward(params, tokens, config=spec.model, compute=spec)
        answer = np.arange(prompt + cut + BRIDGE, tokens.shape[1])
        at = np.concatenate([np.arange(prompt + start, prompt + cut), answer])
        advantages = jnp.concatenate(
            [
                batch.thinking_advantages[:, start:cut],
                jnp.repeat(batch.answer_advantages[:, j : j + 1], len(answer), axis=1),
            ],
            axis=1,
        )
        states = hidden[:, at - 1].reshape(-1, hidden.shape[-1])
        logp, _ = logprobs.map_logits(
            logprobs.logprob_and_entropy,
            states,
            qwen2.output_head(params),
            tokens[:, at].reshape(-1),
            chunk=states.shape[0],
        )
        loss -= (advantages * logp.reshape(advantages.shape)).sum() / normalizers.tokens
        start = cut
    return loss


def in_turns(jobs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Returns each job's seconds by round. The jobs alternate, after one warm-up call each."""
    for job in jobs.values():
        jax.block_until_ready(job())
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            started = time.perf_counter()
            jax.block_until_ready(job())
            times[name].append(time.perf_counter() - started)
    return times


def one_pass_against_separate(
    arguments: argparse.Namespace,
) -> tuple[dict[str, list[float]], float, int]:
    """Compares the one-pass gradient with separate sequences.

    Returns:
      The seconds of both, the ratio of their operations (separate / one-pass), and the number of
      positions of the one-pass gradient.
    """
    width, heads = arguments.width, max(arguments.width // 64, 1)
    shape = Qwen2Config(
        arguments.vocab, width, 3 * width, arguments.layers, heads, heads, width // heads
    )
    batch = jax.tree.map(
        jnp.asarray,
        make_batch(
            arguments.rows,
            arguments.prompt,
            arguments.thinking,
            arguments.cuts,
            arguments.answer,
            arguments.vocab,
        ),
    )
    params = qwen2.init(jax.random.key(0), shape)
    spec = LearnerSpec(
        shape,
        None,
        LossConfig(entropy_coef=0.0),
        None,
        arguments.thinking,
        scan=False,
        remat="none",
        chunk=10**9,
    )
    normalizers = loss_normalizers(batch, spec=spec)
    allowed_tokens = jnp.ones(arguments.vocab, bool)
    given = (Minibatch(batch), normalizers, allowed_tokens)
    one = jax.jit(jax.grad(lambda p: objective(p, None, *given, spec=spec)[0]))
    separate = jax.jit(jax.grad(lambda p: separate_loss(p, batch, spec, normalizers)))
    gap = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), one(params), separate(params))
    norm = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(one(params)))
    worst = max(map(float, jax.tree.leaves(gap))) / norm
    print(f"largest difference of the two gradients, relative: {worst:.1e}")
    times = in_turns(
        {"one pass": lambda: one(params), "separate": lambda: separate(params)}, arguments.rounds
    )
    seconds = {name: statistics.median(values) for name, values in times.items()}
    positions = batch.trunk.size + batch.branches.size
    sequences = int(np.sum(batch.context)) + batch.branches.size
    print(f"one pass   {positions:6} positions  {seconds['one pass']:.3f} s")
    print(f"separate   {sequences:6} positions  {seconds['separate']:.3f} s")
    operations = separate_flops(shape, batch) / model_flops(shape, batch)
    print(f"operations, separate / one pass: {operations:.2f}")
    return times, operations, positions


def memory_ratio(rows: int = 4096, width: int = 256, vocab: int = 32768, chunk: int = 256) -> float:
    """Returns the temporary memory of the log-probabilities' gradient: chunked / all at once."""
    abstract = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    arguments = (
        abstract(jnp.float32, rows, width),
        abstract(jnp.float32, vocab, width),
        abstract(jnp.int32, rows),
    )

    def temporaries(chunk: int) -> int:
        total = lambda h, w, ids: logprobs.map_logits(
            logprobs.logprob_and_entropy, h, w, ids, chunk=chunk
        )[0].sum()
        program = jax.jit(jax.grad(total, (0, 1))).lower(*arguments).compile()
        return program.memory_analysis().temp_size_in_bytes

    chunked, full = temporaries(chunk), temporaries(rows)
    print(f"log-probabilities of {rows} tokens, {vocab} ids: chunks of {chunk} need")
    print(f"{chunked / 2**20:.0f} MiB of temporaries, all logits at once {full / 2**20:.0f} MiB")
    return chunked / full


def flops(shape: Qwen2Config, positions: float, targets: float, seen: float) -> float:
    """Returns the model's floating-point operations in an update.

    The backward pass has twice as many operations as the forward pass.

    Args:
      shape: shape of the model.
      positions: number of positions that the layers process.
      targets: number of tokens whose log-probability is computed.
      seen: number of query-key pairs in the attention.
    """
    embeddings = (1 if shape.tie_embeddings else 2) * shape.vocab_size * shape.hidden_size
    layers = 2 * (shape.num_parameters - embeddings) * positions
    head = 2 * shape.vocab_size * shape.hidden_size * targets
    attention = 4 * seen * shape.num_heads * shape.head_dim * shape.num_layers
    return 3 * (layers + head + attention)


def num_targets(batch: Batch) -> int:
    rows, cuts, answer = batch.branches.shape
    return rows * (batch.thinking_advantages.shape[1] + cuts * (answer - BRIDGE))


def model_flops(shape: Qwen2Config, batch: Batch) -> float:
    """Returns the operations of an update on trunks and branches in one pass."""
    rows, trunk = batch.trunk.shape
    _, cuts, answer = batch.branches.shape
    positions = rows * (trunk + cuts * answer)
    seen = rows * (trunk * (trunk + 1) / 2 + cuts * answer * (answer + 1) / 2)
    seen += float(np.sum(batch.context)) * answer
    return flops(shape, positions, num_targets(batch), seen)


def separate_flops(shape: Qwen2Config, batch: Batch) -> float:
    """Returns the operations of the same update with a separate sequence for each cut."""
    lengths = np.asarray(batch.context, float) + batch.branches.shape[-1]
    return flops(shape, lengths.sum(), num_targets(batch), (lengths * (lengths + 1) / 2).sum())


def update_on_gpu(
    arguments: argparse.Namespace,
) -> tuple[list[float], float, float | None]:
    """Measures a complete update with 4,096 positions per row.

    Returns:
      The seconds of each round, positions per second, and MFU (None for an unknown device).
    """
    shape = preset(arguments.shape)
    batch = make_batch(arguments.gpu_rows, 256, 3584, 4, 64, shape.vocab_size)
    mesh = parallel.make_mesh(parallel.MeshShape(1, 1, 1, 1), jax.devices()[:1])
    spec = LearnerSpec(
        shape, None, LossConfig(), None, 4096, dtype=jnp.bfloat16, implementation="cudnn", mesh=mesh
    )
    policy_tx, head_tx = (
        policy_optimizer(OptimizerConfig(), 100),
        value_optimizer(ValueConfig(), OptimizerConfig(), 1),
    )
    init = lambda key: init_state(qwen2.init(key, shape), None, policy_tx, head_tx)
    held = [jax.jit(init)(jax.random.key(0))]
    placed = parallel.place(batch, parallel.row_sharding(mesh))
    allowed_tokens = jnp.ones(shape.vocab_size, bool)
    step = functools.partial(train_step, spec=spec, policy_tx=policy_tx, head_tx=head_tx)

    def update() -> Any:
        held[0], metrics, _ = step(held[0], Minibatch(placed), allowed_tokens)
        return metrics["loss/total"]

    times = in_turns({"update": update}, arguments.rounds)["update"]
    seconds = statistics.median(times)
    positions = batch.trunk.size + batch.branches.size
    operations = model_flops(shape, batch)
    kind = jax.devices()[0].device_kind
    peak = next((tflops for name, tflops in PEAK_TFLOPS.items() if name in kind), None)
    mfu = None if peak is None else operations / seconds / (peak * 1e12)
    print(
        f"{arguments.shape} on {kind}: {positions} positions, {seconds:.3f} s an update, "
        f"{operations / seconds / 1e12:.0f} TFLOP/s of model arithmetic"
    )
    return times, positions / seconds, mfu


def main() -> None:
    arguments = parse()
    times, operations, positions = one_pass_against_separate(arguments)
    one_pass = statistics.median(times["one pass"])
    tokens_per_s = positions / one_pass
    memory = memory_ratio()
    result: dict[str, Any] = {
        "one_pass_vs_separate": round(statistics.median(times["separate"]) / one_pass, 3),
        "arithmetic_ratio": round(operations, 3),
        "logprob_memory_ratio": round(memory, 4),
    }
    measurements = record.seconds(times, "gradient")
    measurements["log-probabilities, memory in chunks"] = record.measurement(
        [memory], unit="of all", exact=True
    )
    if jax.default_backend() == "gpu":
        updates, tokens_per_s, mfu = update_on_gpu(arguments)
        measurements |= record.seconds({"update": updates})
        result["mfu"] = None if mfu is None else round(mfu, 4)
    ratios = {"one_pass_vs_separate": ("gradient, separate", "gradient, one pass")}
    record.write(arguments, measurements, ratios)
    print(json.dumps({**result, "tokens_per_s": round(tokens_per_s, 1)}))


if __name__ == "__main__":
    main()
