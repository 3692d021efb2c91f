"""What the programs of a run on 8 GPUs launch, read, send and hold, compiled without a GPU.

    pip install -e ".[plan]"
    python benchmarks/compiled.py [--models 1.5b 7b 14b] [--cards a100-80 h100] [--out after.json]
    python benchmarks/compiled.py --show after.json --before benchmarks/compiled_before.json

Of each model's shipped config (`configs/qwen2.5-*-math.yaml`, 8 GPUs of 80 GB; overrides behind
`--`): XLA's GPU compiler compiles a chunk of decoding, a chunk of answers and a micro-batch's
gradient, whole and with two layers (`hlo_traffic` reads kernels, bytes, operations and collectives
off them). The library's own scheduler and micro-batch maker say how often each runs, and on how
much (`bacr_plan.schedule`, on the prompt lengths and answers of MATH and budgets
N(1500, 512) all used up, `bacr_plan.lengths`). Nothing is timed.

Bytes of a decoding step are those of all its kernels. The whole program is compiled with the
longest cache; programs of two layers with the longest cache and with half of it say what a layer
reads per position of the cache. Where an attention kernel is told every row's own length (cuDNN),
its keys and values count as the live rows' own keys in tiles of 128, a tile for every other row:
that the kernel skips the rest is what cuDNN documents, not something this can see. The minimum is
the weights once (all but the embedding's rows) and every live key and value once.

An iteration's seconds, at 50 % of the data sheet's dense bfloat16 rate (float32 products at half of
it), 70 % of memory bandwidth and of the links: decoding and answers take the larger of bytes and
products of the slowest device, step by step, and their collectives besides; prefill, scoring and
updates take their products with all padding, an update's as compiled; Adam its bytes. Gathers of
the learner count as hidden behind products. Grading and evaluation are left out.
`update_by_kernel_s` is stricter: every kernel of the update takes the larger of its bytes and
products by itself.

The last line is one JSON object: decode_bytes_vs_minimum (7B, A100, 64 rows a device),
update_positions_real (share of the positions computed, 7B), planned_iteration_s_7b_a100 and _h100,
plan_iteration_s_* (what `bacr plan` says at the same shares), and with --before all of them of
that file as before_*.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before JAX is imported: there is no GPU, and its plugin would look for a driver.
os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"

import numpy as np
from jax.stages import Lowered

import bacr_jax
import hlo_traffic as hlo
from answer_program import answers_of
from bacr_jax.config import Config
from bacr_jax.config import io as config_io
from bacr_jax.parallel import MeshShape
from bacr_plan import compiling, costs, lengths, report, schedule, seconds
from bacr_plan.devices import DEVICES, GIB, Device
from bacr_plan.programs import Programs
from bacr_plan.workload import Workload, sizes_of

SHARES = seconds.Shares(matmul=0.5, bandwidth=0.7, links=0.7)
DEVICES_OF_A_BOX = 8
CONFIGS = Path(bacr_jax.__file__).parents[2] / "configs"
FEW = 2  # layers of the small programs


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=["1.5b", "7b", "14b"])
    parser.add_argument("--cards", nargs="*", default=["a100-80", "h100"], choices=list(DEVICES))
    parser.add_argument("--out", type=Path, help="write figures here; what is there is kept")
    parser.add_argument("--show", type=Path, help="compile nothing: figures that --out wrote")
    parser.add_argument("--before", type=Path, help="figures of another tree, shown beside")
    parser.add_argument("overrides", nargs="*", help="config keys, behind --")
    return parser.parse_args()


@dataclasses.dataclass(frozen=True)
class Case:
    """One model's run on 8 of one card.

    Attributes:
      config: its settings.
      work: its sizes.
      layout: its mesh.
      device: the card.
    """

    config: Config
    work: Workload
    layout: MeshShape
    device: Device

    @classmethod
    def of(cls, model: str, card: str, overrides: list[str]) -> "Case":
        """The shipped config of a model (7b) by the paper's method, with overrides."""
        files = [CONFIGS / f"qwen2.5-{model}-math.yaml", CONFIGS / "methods/bacr-paper.yaml"]
        config = config_io.load(files, overrides)
        work, layout = sizes_of(config, DEVICES_OF_A_BOX)
        prompts = lengths.MATH.at_most(config.data.max_prompt_tokens)
        rows = lengths.rows_of(config, prompts, cuts=work.cuts)
        work = dataclasses.replace(work, draw=lambda: rows)
        return cls(config, work, layout, DEVICES[card])

    @property
    def rates(self) -> tuple[float, float, float]:
        """Operations, bytes of memory and bytes of links per second."""
        device = self.device
        return (
            device.matmul_flops * SHARES.matmul,
            device.memory_bandwidth * SHARES.bandwidth,
            device.link_bandwidth * SHARES.links,
        )

    def programs(self, layers: int, thinking: int | None = None) -> Programs:
        """The run's programs on described devices, with fewer layers or shorter caches."""
        work = self.work
        few = dataclasses.replace(work.model, num_layers=layers)
        config = compiling.described(self.config, few, fused_attention=work.fused_attention)
        if thinking is not None:
            budget = dataclasses.replace(config.budget, max=thinking)
            evaluated = dataclasses.replace(config.eval, budgets=(thinking,))
            config = dataclasses.replace(config, budget=budget, eval=evaluated)
        devices = compiling.described_devices(self.device, DEVICES_OF_A_BOX)
        return Programs(config, work.model.vocab_size, devices)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program for described devices: what its text and its memory analysis say."""

    kernels: list[hlo.Kernel]
    memory: compiling.ProgramMemory

    @classmethod
    def of(cls, lowered: Any) -> "Compiled":
        """Compiles, and keeps what is asked of the result."""
        done = lowered.compile()
        return cls(hlo.Program(done.as_text()).kernels, compiling.measured(done, 0.0))

    @property
    def step(self) -> list[hlo.Kernel]:
        """Kernels of one round of a decoding loop."""
        inside = [one for one in self.kernels if one.loop]
        return [dataclasses.replace(one, times=one.times // one.loop[0]) for one in inside]


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a decoding program on one device.

    Attributes:
      fixed: bytes, whatever the length of the cache.
      per_position: bytes per position of the cache, all rows together.
      key: bytes per live key, of attention that is told the rows' lengths; else 0.
      flops: operations, as at the bfloat16 rate.
      sent: bytes of collectives.
    """

    fixed: float
    per_position: float
    key: float
    flops: float
    sent: float

    @classmethod
    def of(cls, case: Case, lower: Callable[[Programs], Lowered]) -> tuple[Compiled, "Step"]:
        """The whole program (decode or answers), and a step of it as two small ones explain it."""
        work, layers = case.work, case.work.model.num_layers
        make = lambda *shape: Compiled.of(lower(case.programs(*shape)))
        whole, few, half = make(layers), make(FEW), make(FEW, work.thinking // 2)
        keyless = lambda x: hlo.traffic(x.step) - sum(one.keys * one.times for one in x.step)
        positions = work.thinking - work.thinking // 2
        per_position = (keyless(few) - keyless(half)) / FEW * layers / positions
        told = sum(one.keys * one.times for one in whole.step)
        rows = work.slots // case.layout.slot_shards
        return whole, cls(
            fixed=keyless(whole) - per_position * work.trunk,
            per_position=per_position,
            key=told / (rows * work.trunk),
            flops=hlo.bfloat16_flops(whole.step),
            sent=sum(one.bytes * one.times for one in whole.step if one.kind == "collective"),
        )

    def seconds(self, case: Case, length: int, keys: Any, share: float = 1.0) -> Any:
        """Of a step with a share of the slots, which read `keys` where they are told lengths."""
        rate, bandwidth, links = case.rates
        read = self.bytes(length, keys, share) / bandwidth
        return np.maximum(read, self.flops * share / rate) + self.sent * share / links

    def bytes(self, length: int, keys: Any, share: float = 1.0) -> Any:
        """The same in bytes."""
        return self.fixed + share * self.per_position * length + self.key * keys


def rollout(case: Case, trunks: Step, answers: Step) -> dict[str, float]:
    """Seconds of a rollout's parts, and the bytes of its decoding steps against the minimum."""
    work, layout = case.work, case.layout
    made = schedule.rollout(work, layout)
    weights = costs.weight_bytes(work, layout)
    key = costs.kv_bytes_per_token(work) / layout.decode_tensor
    rows = work.slots // layout.slot_shards
    decode = moved = least = answering = 0.0
    for chunk in made.chunks:
        share = chunk.slots / work.slots
        decode += trunks.seconds(case, chunk.length, chunk.tiles, share).max(1).sum()
        moved += trunks.bytes(chunk.length, chunk.tiles, share).mean(1).sum()
        least += chunk.steps * weights + chunk.live.mean(1).sum() * key
    # Attention that is told lengths passes over a row's keys once for each answer.
    keys = costs.answer_positions(work, 0) / work.cuts
    for count, length, steps in made.answers:
        share = count / work.slots
        answering += steps * answers.seconds(case, length, share * rows * keys, share)
    prefill = sum(costs.prefill_flops(work, *one) for one in made.prefills)
    return {
        "steps": made.steps,
        "step_gb": moved / made.steps / 1e9,
        "minimum_step_gb": least / made.steps / 1e9,
        "decode_bytes_vs_minimum": moved / least,
        "decode_s": decode,
        "answers_s": answering,
        "prefill_s": prefill / layout.num_devices / case.rates[0],
    }


def learner(case: Case) -> dict[str, Any]:
    """Seconds of scoring and updates, and what the compiled micro-batch says."""
    work, layout = case.work, case.layout
    rate, bandwidth, _ = case.rates
    whole = Compiled.of(case.programs(work.model.num_layers).train())
    # By rows one program holds all micro-batches of an update; by tokens it is the widest one's.
    rows = work.micro_rows if work.by_tokens else work.update_rows
    widest = schedule.PlannedMicroBatch(rows, work.trunk, work.cuts * work.branch)
    explained = costs.forward_flops(work, widest)
    times_forward = hlo.bfloat16_flops(whole.kernels) * layout.num_devices / explained
    updates = schedule.updates(work, layout)
    made = [one for update in updates for one in update]
    forward = sum(costs.forward_flops(work, one) for one in made) / layout.num_devices / rate
    adam = work.config.train.minibatches * costs.optimizer_bytes(work, layout) / bandwidth
    alone = sum(
        one.times * max(one.bytes / bandwidth, one.flops * (1 + one.half_rate) / rate)
        for one in whole.kernels
        if one.kind != "collective"
    )
    share = sum(costs.forward_flops(work, one) for one in made) / explained
    return {
        "compiled": whole,
        "times_forward": times_forward,
        "update_s": forward * times_forward + adam,
        "update_by_kernel_s": alone * share,
        "score_s": forward * work.scored,
        "micro_batches": [len(update) for update in updates],
        "positions_real": schedule.real_share(work, updates),
    }


def figures(model: str, card: str, overrides: list[str]) -> dict[str, Any]:
    """Everything about one model on one card."""
    case = Case.of(model, card, overrides)
    decode, trunks = Step.of(case, Programs.decode)
    answer, answers = Step.of(case, answers_of)
    learned = learner(case)
    train = learned.pop("compiled")
    sampled = rollout(case, trunks, answers)
    planned = report.Plan(
        case.work,
        case.layout,
        device=case.device,
        memory_gib=case.device.memory_gib,
        compilation=compiling.Compilation(
            "compiled", {"train": train.memory, "decode": decode.memory}, exact=True
        ),
    )
    parts = ("decode_s", "answers_s", "prefill_s")
    says = seconds.step_seconds(case.work, case.layout, case.device)
    return {
        "kernels_a_step": hlo.launches(decode.step),
        "kernels_an_answer_step": hlo.launches(answer.step),
        **sampled,
        **learned,
        "iteration_s": sum(sampled[p] for p in parts) + learned["update_s"] + learned["score_s"],
        "plan_says_s": {phase: round(value, 1) for phase, value in says.items()},
        "rollout_peak_gib": planned.phases["rollout"].peak / GIB,
        "update_peak_gib": planned.phases["update"].peak / GIB,
        "decode_temporaries_gib": decode.memory.temporaries / GIB,
        "update_temporaries_gib": train.memory.temporaries / GIB,
        "collectives": {
            "decode": hlo.collectives(decode.kernels),
            "answers": hlo.collectives(answer.kernels),
            "update": hlo.collectives(train.kernels),
        },
    }


ROWS = {
    "kernels_a_step": "kernels of a decoding step",
    "step_gb": "GB a decoding step reads and writes, mean",
    "minimum_step_gb": "  the least: weights once, live keys once",
    "decode_bytes_vs_minimum": "  times the least",
    "decode_temporaries_gib": "temporaries of decoding, GiB",
    "rollout_peak_gib": "peak of the rollout, GiB",
    "update_peak_gib": "peak of the update, GiB",
    "positions_real": "share of the learner's positions that are real",
    "times_forward": "an update's products, in forward passes",
    "decode_s": "decoding, s",
    "answers_s": "answers, s",
    "prefill_s": "prefill, s",
    "score_s": "scoring, s",
    "update_s": "update, s",
    "update_by_kernel_s": "  kernel by kernel, s",
    "iteration_s": "iteration, s",
}


def table(found: dict[str, dict], before: dict[str, dict]) -> str:
    """One row a figure; before / after where both are known."""
    lines = [f"{'':48}" + "".join(f"{name:>20}" for name in found)]
    for key, title in ROWS.items():
        cells = []
        for name, one in found.items():
            was = before.get(name, {}).get(key)
            cells.append(f"{one[key]:.4g}" if was is None else f"{was:.4g} / {one[key]:.4g}")
        lines.append(f"{title:48}" + "".join(f"{cell:>20}" for cell in cells))
    for name, one in found.items():
        for program, loops in one["collectives"].items():
            for loop, sent in loops.items():
                shown = [f"{x['what']} {x['shape']} x {x['times']}" for x in sent[:6]]
                lines.append(f"{name}, {program}, {loop}: {'; '.join(shown)}")
    return "\n".join(lines)


def headline(found: dict[str, dict], prefix: str = "") -> dict[str, float]:
    """The figures of the last line, as far as they are there."""
    line = {}
    for card, short in (("a100-80", "a100"), ("h100", "h100")):
        one = found.get(f"7b {card}")
        if one is None:
            continue
        if card == "a100-80":
            line["decode_bytes_vs_minimum"] = round(one["decode_bytes_vs_minimum"], 3)
            line["update_positions_real"] = round(one["positions_real"], 3)
        line[f"planned_iteration_s_7b_{short}"] = round(one["iteration_s"], 1)
        line[f"plan_iteration_s_7b_{short}"] = round(sum(one["plan_says_s"].values()), 1)
    return {prefix + key: value for key, value in line.items()}


def main() -> int:
    options = parse()
    read = lambda file: json.loads(file.read_text()) if file and file.is_file() else {}
    found = read(options.show or options.out)
    if options.show is None:
        for model in options.models:
            for card in options.cards:
                found[f"{model} {card}"] = figures(model, card, options.overrides)
                if options.out:
                    options.out.write_text(json.dumps(found, indent=1) + "\n")
    before = read(options.before)
    print(table(found, before))
    print(json.dumps({**headline(found), **headline(before, "before_")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
