"""Analyses the compiled programs of a run on 8 GPUs: kernels, memory traffic and communication.

No GPU is needed, because XLA compiles for a described device.

    pip install -e ".[plan]"
    python benchmarks/compiled.py [--models 1.5b 7b 14b] [--cards a100-80 h100] [--out after.json]
    python benchmarks/compiled.py --show after.json --before benchmarks/compiled_before.json

For each model, the benchmark loads the shipped config (`configs/qwen2.5-*-math.yaml`, 8 GPUs with
80 GB; overrides follow `--`). It compiles a chunk of decoding, a chunk of answers, and the gradient
of a micro-batch, each with all layers and with two layers. `hlo_traffic` extracts the kernels,
bytes, operations and collectives from the compiled programs. `bacr_plan.schedule` computes how
often each program runs and on how many rows, for the prompt and answer lengths of MATH and for
budgets from N(1500, 512) that are fully used (`bacr_plan.lengths`). Nothing is timed.

The bytes of a decoding step are the sum over its kernels. The program with all layers is compiled
for the longest cache. Two programs with two layers, for the longest cache and for half of it,
determine how many bytes a layer reads per position of the cache. If an attention kernel receives
the length of each row (cuDNN), its keys and values are counted as the keys of the live rows,
rounded up to tiles of 128, plus one tile for every other row. cuDNN documents that its kernel skips
all other keys, but this benchmark can't verify it. The minimum number of bytes is one read of the
weights (without the embedding) and one read of every live key and value.

The seconds of an iteration are estimated at 50 % of the data sheet's dense bfloat16 rate (half of
that for float32 products), and at 70 % of the memory and link bandwidth. A step of decoding or
answers takes the maximum of the time for its bytes and the time for its products on the slowest
device, plus the time of its collectives. Prefill, scoring and updates take the time of their
products including padding; for updates, these are the products of the compiled program. Adam takes
the time of its bytes. The all-gathers of the learner are assumed to overlap with products. Grading
and evaluation are not included. `update_by_kernel_s` is a stricter estimate, in which each kernel
of the update takes the maximum of the time for its bytes and for its products.

The last line is one JSON object: decode_bytes_vs_minimum (7B, A100, 64 rows per device),
update_positions_real (share of real tokens among the computed positions, 7B),
planned_iteration_s_7b_a100 and _h100, and plan_iteration_s_* (the estimate of `bacr plan` at the
same rates, without its minimum time of a decoding step for kernel launches). With --before, it also
contains the values of that file as before_*.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Set before JAX is imported, because JAX's CUDA plugin would otherwise search for a GPU driver.
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
from bacr_jax.config.settings import resolve
from bacr_jax.parallel import MeshShape
from bacr_plan import compiling, costs, lengths, report, schedule, seconds
from bacr_plan.devices import DEVICES, GIB, Device
from bacr_plan.programs import Programs
from bacr_plan.workload import Workload, sizes_of

SHARES = seconds.Shares(matmul=0.5, bandwidth=0.7, links=0.7)
DEVICES_OF_A_BOX = 8
CONFIGS = Path(bacr_jax.__file__).parents[2] / "configs"
FEW = 2  # Number of layers of the small programs.


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
    """A run of one model on 8 GPUs of one type.

    Attributes:
      config: config of the run.
      work: sizes of the model and the batches.
      layout: shape of the device mesh.
      device: the type of GPU.
    """

    config: Config
    work: Workload
    layout: MeshShape
    device: Device

    @classmethod
    def of(cls, model: str, card: str, overrides: list[str]) -> "Case":
        """Loads the shipped config of a model (e.g. 7b) with the paper's method and overrides."""
        files = [CONFIGS / f"qwen2.5-{model}-math.yaml", CONFIGS / "methods/bacr-paper.yaml"]
        config = config_io.load(files, overrides)
        work, layout = sizes_of(config, DEVICES_OF_A_BOX)
        prompts = lengths.MATH.at_most(config.data.max_prompt_tokens)
        rows = lengths.rows_of(resolve(config).method, prompts, cuts=work.cuts)
        work = dataclasses.replace(work, draw=lambda: rows)
        return cls(config, work, layout, DEVICES[card])

    @property
    def rates(self) -> tuple[float, float, float]:
        """Returns the achievable FLOP/s, memory bytes/s and link bytes/s of a device."""
        device = self.device
        return (
            device.matmul_flops * SHARES.matmul,
            device.memory_bandwidth * SHARES.bandwidth,
            device.link_bandwidth * SHARES.links,
        )

    def programs(self, layers: int, thinking: int | None = None) -> Programs:
        """Returns the run's programs on described devices, for a number of layers.

        `thinking` replaces the maximum number of thinking tokens, for a shorter cache.
        """
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
    """Kernels and memory usage of a program that was compiled for described devices."""

    kernels: list[hlo.Kernel]
    memory: compiling.ProgramMemory

    @classmethod
    def of(cls, lowered: Any) -> "Compiled":
        """Compiles a lowered program and extracts its kernels and memory usage."""
        done = lowered.compile()
        return cls(hlo.Program(done.as_text()).kernels, compiling.measured(done, 0.0))

    @property
    def step(self) -> list[hlo.Kernel]:
        """Returns the kernels of one iteration of the decoding loop."""
        inside = [one for one in self.kernels if one.loop]
        return [dataclasses.replace(one, times=one.times // one.loop[0]) for one in inside]


@dataclasses.dataclass(frozen=True)
class Step:
    """Cost of one step of a decoding program on one device.

    Attributes:
      fixed: bytes that do not depend on the length of the cache.
      per_position: bytes per position of the cache, for all rows together.
      key: bytes per live key if the attention kernel receives the rows' lengths, otherwise 0.
      flops: bfloat16 operations; float32 operations count twice.
      sent: bytes of collectives.
    """

    fixed: float
    per_position: float
    key: float
    flops: float
    sent: float

    @classmethod
    def of(cls, case: Case, lower: Callable[[Programs], Lowered]) -> tuple[Compiled, "Step"]:
        """Compiles a program (decoding or answers) and computes the cost of one of its steps.

        The dependence on the cache length comes from two small programs with `FEW` layers.
        """
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
        """Returns the seconds of a step.

        Args:
          case: the run.
          length: length of the cache, in positions.
          keys: number of live keys, for attention that receives the rows' lengths.
          share: fraction of the slots that the step computes.
        """
        rate, bandwidth, links = case.rates
        read = self.bytes(length, keys, share) / bandwidth
        return np.maximum(read, self.flops * share / rate) + self.sent * share / links

    def bytes(self, length: int, keys: Any, share: float = 1.0) -> Any:
        """Returns the bytes of a step. The arguments are the same as for `seconds`."""
        return self.fixed + share * self.per_position * length + self.key * keys


def rollout(case: Case, trunks: Step, answers: Step) -> dict[str, float]:
    """Returns the seconds of each part of a rollout, and its decoding bytes over the minimum."""
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
    # An attention kernel that receives the rows' lengths reads a row's keys once for each answer.
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
    """Returns the seconds of scoring and updates, and figures of the compiled micro-batch."""
    work, layout = case.work, case.layout
    rate, bandwidth, _ = case.rates
    whole = Compiled.of(case.programs(work.model.num_layers).train())
    # With micro_batch_rows, one program contains all micro-batches of an update. With
    # micro_batch_tokens, the program is for the widest micro-batch.
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
    """Returns all figures of one model on one type of GPU."""
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
    # The estimate of this benchmark does not include kernel launches.
    says = seconds.step_seconds(case.work, case.layout, case.device, launch=0.0)
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
    """Formats a table with one row per figure, as before / after if both values are available."""
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
    """Returns the available figures for the JSON object on the last line."""
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
