"""What only one NVIDIA GPU can show: cuDNN's attention, decoding, runs that repeat bit for bit.

    JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu

`BACR_GPU_TESTS=cpu` runs the same on a CPU, with XLA's attention in cuDNN's place.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bacr_jax.model import kv_cache
from bacr_jax.model.attention import cached_attention, causal_attention, merge
from bacr_jax.rollout.cudnn_decoding import attend_rows
from bacr_jax.runs.metrics import without_timings
from rollout_world import make_prompts, make_rules

pytestmark = pytest.mark.gpu

PROJECT = Path(__file__).parents[2]
# A bfloat16 has 8 significant bits: rounding to it errs by at most this share.
ROUNDING = 2.0**-9
# An odd number of positions, whose gradient JAX gives to cuDNN only with one more.
LENGTHS = np.array([191, 130, 64, 1])


@pytest.fixture(scope="module")
def device():
    """The GPU, or a CPU in its place where that is asked for."""
    if os.environ.get("BACR_GPU_TESTS") == "cpu":
        return jax.devices("cpu")[0]
    found = jax.devices()[0]
    if found.platform != "gpu":
        pytest.skip("needs an NVIDIA GPU: JAX_PLATFORMS=cuda,cpu (BACR_GPU_TESTS=cpu: without one)")
    return found


@pytest.fixture(scope="module")
def rows(device):
    """Queries, keys, values and a cotangent in bfloat16; large numbers where there is padding."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (6, 2, 2, 6)  # three query heads share a key/value head
    shape = lambda n: (len(LENGTHS), int(LENGTHS.max()), n, 64)
    q, k, v, g = (jax.random.normal(key, shape(n)) for key, n in zip(keys, heads))
    real = real_tokens()
    pad = lambda x, value: jnp.where(real, x, value).astype(jnp.bfloat16)
    padded = pad(q, 100.0), pad(k, 100.0), pad(v, 100.0), pad(g, 0.0)
    return tuple(jax.device_put(x, device) for x in padded)


def real_tokens():
    return (np.arange(LENGTHS.max()) < LENGTHS[:, None])[..., None, None]


def attend(device, q, k, v):
    """As the learner does in bfloat16 on this device."""
    implementation = "cudnn" if device.platform == "gpu" else "xla"
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    return causal_attention(q, k, v, implementation=implementation, lengths=lengths)


def attend_cache(device, q, k, v):
    """One query of each row over its own keys, as decoding does in bfloat16 on this device."""
    lengths = jnp.asarray(LENGTHS, jnp.int32)
    cache = kv_cache.make(k, v)
    if device.platform == "gpu":
        return attend_rows(q, cache, lengths)
    seen = (jnp.arange(cache.length) < lengths[:, None])[:, None]
    return merge([cached_attention(q, cache.k, cache.v, seen)], q.dtype)


def test_a_token_over_the_keys_of_its_row_equals_fp32(device, rows):
    q, k, v, _ = rows
    last = jnp.take_along_axis(q, jnp.asarray(LENGTHS - 1)[:, None, None, None], axis=1)
    with jax.default_device(device):
        fused = np.asarray(jax.jit(attend_cache, static_argnums=0)(device, last, k, v), np.float32)
        exact = np.asarray(jax.jit(attend_exactly)(q, k, v))
    exact = np.take_along_axis(exact, (LENGTHS - 1)[:, None, None, None], axis=1)
    largest = np.abs(np.where(real_tokens(), np.asarray(v, np.float32), 0.0)).max()
    assert np.abs(fused - exact).max() <= 3 * ROUNDING * largest


def attend_exactly(q, k, v):
    """The same in fp32."""
    with jax.default_matmul_precision("highest"):
        return causal_attention(*(x.astype(jnp.float32) for x in (q, k, v)))


def test_fused_attention_of_right_padded_rows_equals_fp32(device, rows):
    q, k, v, _ = rows
    with jax.default_device(device):
        fused = np.asarray(jax.jit(attend, static_argnums=0)(device, q, k, v), np.float32)
        exact = np.asarray(jax.jit(attend_exactly)(q, k, v))
    # Two roundings: of the softmax weights, which sum to 1 and weigh values, and of the result.
    # The third part is for fp32 sums and exponentials.
    largest = np.abs(np.where(real_tokens(), np.asarray(v, np.float32), 0.0)).max()
    off = np.where(real_tokens(), np.abs(fused - exact), 0.0)
    assert off.max() <= 3 * ROUNDING * largest
    # A row of one token is its own value.
    expected = np.repeat(np.asarray(v[3, 0], np.float32), 3, axis=0)
    np.testing.assert_array_equal(fused[3, 0], expected)


def test_gradients_of_fused_attention_equal_fp32_and_padding_gets_none(device, rows):
    *inputs, cotangent = rows

    def gradients(f):
        total = lambda q, k, v: (f(q, k, v).astype(jnp.float32) * cotangent).sum()
        return jax.jit(jax.grad(total, (0, 1, 2)))(*inputs)

    with jax.default_device(device):
        fused = gradients(lambda *x: attend(device, *x))
        with jax.default_matmul_precision("highest"):
            exact = gradients(attend_exactly)
    for name, one, other in zip("qkv", fused, exact):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        # Rounded on the way: the result, its product with the cotangent, the weights, their
        # gradient, the input's gradient; each counts at most twice, since a difference is taken.
        off = np.linalg.norm(one - other) / np.linalg.norm(other)
        assert off <= 10 * ROUNDING, name
        assert not np.where(real_tokens(), 0.0, one).any(), name


def test_greedy_decoding_in_fp32_is_that_of_the_cpu(device, world):
    from bacr_jax.rollout import RolloutRequest, SamplingSetup, generate, sampling_params

    prompts = make_prompts([1, 5, 3, 2, 4, 5, 1], 5)
    budgets = np.array([12, 0, 1, 7, 12, 5, 3])

    def decode(place):
        # A GPU would take TF32 for products in fp32.
        with jax.default_device(place), jax.default_matmul_precision("highest"):
            return generate(
                jax.device_put(world.decode, place),
                prompts,
                RolloutRequest(budgets, np.stack([budgets // 2, budgets], axis=1)),
                jax.random.key(3),
                SamplingSetup(
                    world.spec(4),
                    make_rules(),
                    sampling_params(0.0),
                    lambda b: jax.device_put(world.phi_of(b), place),
                ),
            )

    here, there = decode(device), decode(jax.devices("cpu")[0])
    off = np.abs(here.trunks.logprobs - there.trunks.logprobs).max()
    says = f"log-probabilities differ by up to {off:.1e}"
    np.testing.assert_array_equal(here.trunks.tokens, there.trunks.tokens, err_msg=says)
    np.testing.assert_array_equal(here.branches.tokens, there.branches.tokens, err_msg=says)
    assert off < 1e-4


# The quickstart, with a warm-up of no use, few questions and few answers.
SHORT = (
    *(
        "warmup.steps=20",
        "warmup.target_accuracy=0",
        "warmup.short_accuracy=0",
        "warmup.hold_accuracy=0",
    ),
    *("rollout.questions=8", "train.steps=3", "eval.size=16", "eval.samples=1"),
    *("output.tensorboard=false", "reproducible=true"),
    # The second run compiles anew, and chooses its kernels again.
    "output.compile_cache=none",
)


def test_the_quickstart_repeats_bit_for_bit(device, tmp_path):
    on_gpu = device.platform == "gpu"
    # Side by side: compiling is most of it. JAX would give the first most of the GPU's memory.
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cuda" if on_gpu else "cpu",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    quickstart = PROJECT / "configs" / "quickstart.yaml"
    command = [sys.executable, "-m", "bacr_jax.train", "--config", str(quickstart)]
    running = [
        subprocess.Popen(
            [*command, *SHORT, f"output.dir={tmp_path / name}"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "other")
    ]
    said = [process.communicate()[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], said[0][-3000:] + said[1][-3000:]
    one, other = tmp_path / "one", tmp_path / "other"
    assert without_timings(one / "metrics.jsonl") == without_timings(other / "metrics.jsonl")
    traces = sorted(path.relative_to(one) for path in (one / "rollouts").iterdir())
    assert len(traces) == 3
    for name in (Path("eval.jsonl"), *traces):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
