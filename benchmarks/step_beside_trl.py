"""Compares the seconds of a GRPO step with TRL, for the same model and shapes on the same core.

    python benchmarks/step_beside_trl.py --folder runs/beside-trl [--rounds 9] [--record FILE]

The script creates two virtual environments in the folder unless they exist: `ours` (this clone) and
`trl` (TRL 1.16, transformers 5.23, PyTorch), installed with pip. `--ours` and `--trl` select
existing interpreters with these packages instead. `step.py` and `step_trl.py` define a step. Each
of them runs in one process with one thread on the first core. They alternate, so that only one of
them runs at any time. The script prints medians and quartiles.

The last line is one JSON object: step_s, bacr_step_s, trl_step_s, and the ratios trl_over_step and
bacr_over_step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import record

HERE = Path(__file__).parent
TRL = ("trl==1.16.*", "transformers==5.23.*", "torch==2.13.*", "accelerate", "datasets")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/beside-trl"))
    parser.add_argument("--ours", type=Path, help="an interpreter that has this package")
    parser.add_argument("--trl", type=Path, help="an interpreter that has TRL")
    parser.add_argument("--model", type=Path, help="a model's folder; default: a small random one")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new", type=int, default=128, help="tokens of an answer")
    parser.add_argument(
        "--bfloat16",
        action="store_true",
        help="16-bit products: model.product_dtype here, bf16 there",
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument(
        "--trl-parts", type=int, default=1, help="parts in which TRL accumulates its gradients"
    )
    record.add_option(parser)
    return parser.parse_args()


def interpreter(folder: Path, packages: list[str]) -> Path:
    """Returns the interpreter of a virtual environment, which is created if it does not exist."""
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        print(f"making {folder}: {' '.join(packages)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *packages]
        subprocess.run(install, check=True)
        (folder / "made").touch()
    return python


class Steps:
    """A process that runs one training step per call."""

    def __init__(self, python: Path, script: str, *options: str):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [str(python), str(HERE / script), *options]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        core = min(os.sched_getaffinity(0))
        os.sched_setaffinity(self.process.pid, {core})

    def __call__(self) -> dict[str, float]:
        """Runs a step and returns its seconds, keyed by the kind of step."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.process.args}: ended with exit code {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """Closes stdin of the process and waits until it has exited."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    arguments = parse()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    ours = arguments.ours or interpreter(folder / "ours", ["-e", str(HERE.parent)])
    trl = arguments.trl or interpreter(folder / "trl", [*TRL])
    given = ["--model", str(arguments.model.absolute())] if arguments.model else []
    if not (folder / "prompts.jsonl").exists():
        make = [str(trl), str(HERE / "step_trl.py"), "--make", str(folder), *given]
        subprocess.run(make, check=True)
    model = given or ["--model", str(folder / "model")]
    files = (*model, "--prompts", str(folder / "prompts.jsonl"))
    group = ("--group", str(arguments.group), "--new", str(arguments.new))
    our_products, their_products = (
        (["--products", "bfloat16"], ["--bfloat16"]) if arguments.bfloat16 else ([], [])
    )
    parts = ("--parts", str(arguments.trl_parts))
    sides = [
        Steps(ours, "step.py", *files, *group, *our_products, "--on-demand"),
        Steps(trl, "step_trl.py", *files, *group, *their_products, *parts),
    ]
    found: dict[str, list[float]] = {}
    for index in range(arguments.warm_up + arguments.rounds):
        for name, seconds in (sides[0]() | {f"trl_{k}": v for k, v in sides[1]().items()}).items():
            if index >= arguments.warm_up:
                found.setdefault(name, []).append(seconds)
    for side in sides:
        side.close()
    for name, seconds in found.items():
        low, middle, high = statistics.quantiles(seconds, n=4)
        print(f"{name:12s} median {middle:.3f} s, quartiles {low:.3f} to {high:.3f}")
    record.write(
        arguments,
        record.seconds(found),
        {
            "trl_over_step": ("trl_step_s", "step_s"),
            "bacr_over_step": ("bacr_step_s", "step_s"),
        },
    )
    middles = {name: statistics.median(seconds) for name, seconds in found.items()}
    ratios = {
        "trl_over_step": middles["trl_step_s"] / middles["step_s"],
        "bacr_over_step": middles["bacr_step_s"] / middles["step_s"],
    }
    print(json.dumps({name: round(value, 4) for name, value in (middles | ratios).items()}))


if __name__ == "__main__":
    main()
