"""Creates artificial studies and cells, for tests of tables and figures.

A cell contains the results of one run of a study (`bacr_study.cells`). The results are drawn from a
simple model of methods, budgets and problems, so nothing is trained.
"""

import numpy as np

from bacr_study.cells import Cell, correct_digits, write_cell
from bacr_study.spec import PARTS, Arm, Study, Sweep, Task, cell_id

ARMS = (
    Arm("cot", "Standard CoT"),
    Arm("sc", "Self-Consistency", of="cot", votes=2),
    Arm("grpo", "GRPO"),
    Arm("dapo", "DAPO"),
    Arm("anytime", "AnytimeReasoner"),
    Arm("selfbudgeter", "SelfBudgeter"),
    Arm("hapo", "HAPO"),
    Arm("bacr_paper", "BACR paper", marked=True),
    Arm("bacr_robust", "BACR robust"),
)
# Ids of the arms that evaluate the policy before training.
UNTRAINED = ("cot", "sc")
BUDGETS = (8, 16, 32, 64, 96)
PAPER_ROWS = ("", "BUP", "BUP+CAS", "BUP+TDR", "BUP+BCAE", "BUP+CAS+TDR", "BUP+CAS+BCAE")
_LEVELS = 5


def made_task(id_, label, hard="hard"):
    """Returns a task with the evaluation sets that `make_cell` fills, `test` and `hard`."""
    return Task(id_, label, (), budgets=BUDGETS, main="test", hard=hard)


def main_study(**changes):
    """Returns a study of nine arms on two tasks, with six views (tables and figures).

    Args:
      changes: fields of `Study` with other values.
    """
    settings = {
        "name": "main",
        "title": "Accuracy by budget, nine methods",
        "tasks": (
            made_task("tradeoff", "Trade-off"),
            made_task("ledger", "Ledger"),
        ),
        "arms": ARMS,
        "seeds": (0, 1, 2, 3, 4),
        "views": ("accuracy", "hard", "efficiency", "curriculum", "convergence", "difficulty"),
        "reference": ("anytime", "grpo"),
        "size": "cpu",
    }
    return Study(**{**settings, **changes})


def ablation_study():
    """Returns a study of all 16 combinations of the four parts of BACR."""
    arms = []
    for number in range(16):
        parts = tuple(part for i, part in enumerate(PARTS) if number >> i & 1)
        name = "+".join(parts)
        marked = name in (*PAPER_ROWS, "+".join(PARTS))
        id_ = name.lower().replace("+", "_") or "none"
        arms.append(Arm(id_, name or "none", parts=parts, marked=marked))
    return main_study(
        name="ablation",
        title="All combinations of the four parts",
        tasks=(made_task("tradeoff", "Trade-off", hard=""),),
        arms=tuple(arms),
        views=("ablation",),
        reference=("none",),
    )


def sweep_study(**changes):
    """Returns a study that varies the curriculum's adaptation rate in one arm.

    Args:
      changes: fields of `Study` with other values.
    """
    sweep = Sweep("curriculum.alpha", (0.0, 0.2, 0.4, 0.6, 0.8, 1.0), "adaptation rate α", 0.6)
    settings = {
        "name": "sensitivity",
        "title": "Sensitivity to the adaptation rate",
        "arms": (Arm("bacr_paper", "BACR paper"),),
        "views": ("sensitivity",),
        "reference": (),
        "sweep": sweep,
    }
    return main_study(**{**settings, **changes})


def scale_study():
    """Returns a study of three arms at three model sizes."""
    return sweep_study(
        name="scale",
        title="Three model sizes",
        arms=tuple(arm for arm in ARMS if arm.id in ("grpo", "anytime", "bacr_robust")),
        reference=("anytime",),
        views=("scale",),
        sweep=Sweep("model", ("30k", "130k", "500k"), "model size"),
    )


def _ability(study, variant, seed):
    """Returns the contribution of a variant to the logit of a correct answer."""
    place = [arm.id for arm in study.arms].index(variant.arm)
    parts = len(study.arm(variant.arm).parts)
    value = variant.value if isinstance(variant.value, float) else 0.6
    if isinstance(variant.value, str):
        value = 0.6 + ("30k", "130k", "500k").index(variant.value) / 3
    gain = 0.25 * place if "ablation" not in study.views else 0.3 * parts
    return gain + (value - 0.6) * (1.0 if isinstance(variant.value, str) else -abs(value - 0.6))


def make_cell(study, task, variant, seed, problems=60, samples=4, steps=40):
    """Returns a cell with random results. Equal arguments give equal cells.

    Args:
      task: id of the task.
      problems: number of problems of each evaluation set.
      samples: number of answers to each problem.
      steps: number of training steps.
    """
    number = [v.key for v in study.variants()].index(variant.key)
    rng = np.random.default_rng([seed, number, len(task)])
    # All cells of a task have the same problems. All cells of a seed have the same offset, like
    # runs that start from the same warm-up.
    hard = np.random.default_rng(len(task)).normal(0.0, 1.0, problems)
    shared = np.random.default_rng([seed, 77]).normal(0.0, 0.1)
    levels = np.clip(np.round(hard * 1.2 + 3), 1, _LEVELS).astype(int)
    ability = _ability(study, variant, seed) + shared + rng.normal(0.0, 0.1)
    sets = {}
    for name, shift in (("test", 0.0), ("hard", 1.2)):
        by_mode = {"greedy": {}, "sampled": {}}
        for mode in by_mode:
            for budget in BUDGETS:
                logit = ability + 0.6 * np.log2(budget / 24) - hard - shift
                drawn = rng.binomial(samples, 1 / (1 + np.exp(-logit)))
                used = budget * (0.95 - 0.06 * number / len(study.arms) * np.log2(budget / 4))
                by_mode[mode][str(budget)] = {
                    "accuracy": float(drawn.mean() / samples),
                    "mean_thinking_tokens": float(used + rng.normal(0, 0.2)),
                    "mean_total_tokens": float(used + 6.5 + rng.normal(0, 0.2)),
                    "forced_share": 0.4,
                    "no_answer_share": 0.02,
                    "levels": {},
                    "correct": correct_digits(drawn),
                }
        sets[name] = by_mode
    trained = variant.arm not in UNTRAINED
    return Cell(
        id=cell_id(task, variant, seed),
        study_size="cpu",
        task=task,
        arm=variant.arm,
        seed=seed,
        value=variant.value,
        provenance={
            "commit": "0123abcd",
            "versions": {"jax": "0.10.2", "numpy": "2.2.1"},
            "machine": "2-core CPU",
            "date": f"2026-01-0{seed + 1}",
        },
        config_sha="00ff",
        departures=["the policy is small"] if trained else [],
        steps=steps if trained else 0,
        generated_tokens=steps * 20_000 if trained else 0,
        wall_seconds=60.0 + number if trained else 5.0,
        sets=sets,
        samples={"greedy": samples, "sampled": samples},
        problems_digest={"test": f"aa{len(task)}", "hard": f"bb{len(task)}"},
        levels_of={name: correct_digits(levels) for name in sets},
        curve=_curve(rng, number, steps) if trained else [],
        schedule=_schedule(rng, steps) if variant.arm.startswith("bacr") else [],
    )


def _curve(rng, number, steps):
    """Returns the records of a training curve that rises to a plateau.

    Args:
      number: index of the variant, which determines speed and height of the curve.
    """
    end, speed = 0.3 + 0.03 * number, 8.0 + 12.0 / (number + 1)
    records = []
    for step in range(steps + 1):
        height = end * (1 - np.exp(-step / speed))
        records.append(
            {
                "step": step,
                "tokens": 20_000 * step,
                "seconds": step * (1.5 + 0.02 * number),
                "reward": None if step == 0 else float(0.1 + height + rng.normal(0, 0.03)),
                "thinking": 30.0,
                "accuracy": float(0.2 + height + rng.normal(0, 0.01)) if step % 10 == 0 else None,
            }
        )
    return records


def _schedule(rng, steps):
    """Returns the records of a curriculum with four difficulty groups."""
    group = lambda g, t: {
        "pass_rate": float(min(0.9 - 0.2 * g + 0.3 * t / steps, 1.0)),
        "mu": float(48 + 8 * g - 20 * t / steps * (1.5 - 0.3 * g)),
        "mean_budget": float(48 + 8 * g - 20 * t / steps * (1.5 - 0.3 * g) + rng.normal(0, 1)),
        "weight": float(0.25 + 0.05 * np.sin(g + 3 * t / steps)),
    }
    return [
        {"step": t, "tokens": 20_000 * t, "groups": [group(g, t) for g in range(4)]}
        for t in range(1, steps + 1)
    ]


def write_cells(folder, study, *, seeds=None, skip=(), **kwargs):
    """Writes the cells of a study and returns their ids.

    Args:
      seeds: seeds of the cells to write. None for all seeds of the study.
      skip: ids of cells that are not written.
      kwargs: further arguments of `make_cell`.
    """
    written = []
    for task in study.tasks:
        for variant in study.variants():
            for seed in study.seeds if seeds is None else seeds:
                if cell_id(task.id, variant, seed) not in skip:
                    cell = make_cell(study, task.id, variant, seed, **kwargs)
                    write_cell(folder, cell)
                    written.append(cell.id)
    return written
