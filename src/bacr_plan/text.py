"""A plan for a terminal."""

from bacr_plan import costs
from bacr_plan.devices import GIB, MEMORY_FRACTION
from bacr_plan.report import (
    Plan,
    operations,
    parts,
    predictions,
    real_share,
    traffic,
    updates_in,
)
from bacr_plan.search import Choice
from bacr_plan.seconds import ASSUMED
from bacr_plan.workload import Workload

_PHASE_NAMES = {
    "rollout": "rollout (state, decode copy, cache, temporaries)",
    "score": "scoring (state, temporaries)",
    "update": "update (state, gradients, activations)",
    "evaluation": "evaluation (state, decode copy, cache, temporaries)",
}


def _size(value: float) -> str:
    return f"{value / GIB:7.2f}"


def _verdict(plan: Plan) -> list[str]:
    share = f"{MEMORY_FRACTION:.0%} of {plan.memory_gib:g}"
    limit = f"{plan.limit / GIB:.1f} GiB ({share}; the launch scripts give JAX as much)"
    if plan.fits:
        spare = (plan.limit - plan.peak) / GIB
        return [f"FITS: peak {plan.peak / GIB:.1f} of {limit}, {spare:.1f} GiB to spare"]
    over = (plan.peak - plan.limit) / GIB
    lines = [f"DOES NOT FIT: peak {plan.peak / GIB:.1f} of {limit}, {over:.1f} GiB too much"]
    if plan.suggestion is not None:
        return lines + _shown("What would fit here", plan.suggestion, plan.work)
    lines.append(
        f"No mesh, micro-batch and number of slots fits {plan.layout.num_devices} of these, not "
        "even one row a device."
    )
    return lines + _changes(plan)


def _changes(plan: Plan) -> list[str]:
    """What would fit if something else were changed: the model, the budget, the devices."""
    lines, work = [], plan.work
    if plan.smaller is not None:
        name, choice = plan.smaller
        lines += _shown(f"What would fit here: model.preset={name}", choice, work)
    if plan.shorter is not None:
        budget, choice = plan.shorter
        keys = f"budget.max={budget} eval.budgets=[{budget}]"
        lines += _shown(f"What would fit here: {keys}", choice, work)
    if plan.larger is not None:
        count = plan.larger.layout.num_devices
        lines += _shown(f"What would fit on {count} of them", plan.larger, work)
    if plan.card is not None:
        name, choice = plan.card
        lines += _shown(f"What would fit on as many {name}", choice, work)
    return lines or ["No smaller model, shorter budget, more or larger known GPUs would do."]


def _shown(title: str, choice: Choice, work: Workload) -> list[str]:
    return [f"{title} ({choice.peak / GIB:.1f} GiB):", f"  {choice.overrides(work)}"]


def _largest(plan: Plan) -> str:
    """The largest portions that fit; nobody can write a portion of 0 rows."""
    micro = {"train.micro_batch_rows": plan.max_micro_batch}
    if plan.work.by_tokens:
        micro = {"train.micro_batch_tokens": plan.max_micro_batch * plan.work.row_tokens}
    most = {**micro, "rollout.slots": plan.max_slots}
    if plan.work.evaluated:
        most["eval.slots"] = plan.max_eval_slots
    fits = ", ".join(f"{key}={rows}" for key, rows in most.items() if rows)
    none = " and ".join(key for key, rows in most.items() if not rows)
    parts = [f"Largest on this mesh: {fits}"] if fits else []
    parts += [f"On this mesh no {none} fits, not even one row a device"] if none else []
    return "; ".join(parts)


def _adapters(work: Workload) -> str:
    """What is trained beside the frozen base, and what the sampler reads."""
    million = costs.trained_parameters(work) / 1e6
    read = "the base where it lies" if work.beside else "a copy with the adapters merged in"
    return f"Trained: {million:.1f}e6 numbers beside the frozen base; the sampler reads {read}"


def as_text(plan: Plan) -> str:
    """The plan for a terminal."""
    work, layout = plan.work, plan.layout
    mesh = f"data {layout.data}, fsdp {layout.fsdp}, tensor {layout.tensor}"
    phases = plan.phases
    lines = [
        f"Model    {costs.policy_parameters(work) / 1e9:.2f}e9 parameters ({work.shape_source})",
        f"Devices  {layout.num_devices} x {plan.device.name}, {plan.memory_gib:g} GiB; {mesh}, "
        f"decode tensor {layout.decode_tensor}",
        f"Rows     {work.rows} an iteration, {work.micro_rows} per micro-batch, {work.slots} "
        f"slots; up to {work.prompt} + {work.thinking} tokens and {work.cuts} x {work.branch} in "
        "branches",
        f"Memory   {plan.compilation.source}",
        "",
        "Per device, GiB",
    ]
    for name, value in parts(plan).items():
        lines.append(f"  {name.replace('_', ' '):52}{_size(value)}")
    lines += ["", "Peak of each phase, GiB"]
    for name, meaning in _PHASE_NAMES.items():
        if name in phases and (name != "score" or work.scored):
            lines.append(f"  {meaning:52}{_size(phases[name].peak)}")
    lines += ["", *_verdict(plan)]
    lines.append(_largest(plan))
    if work.adapters:
        lines.append(_adapters(work))
    return "\n".join([*lines, "", *_work(plan), "", *_seconds(plan)])


def _work(plan: Plan) -> list[str]:
    """Operations and bytes of an iteration."""
    flops, moved = operations(plan), traffic(plan)
    return [
        f"Work of an iteration: {sum(flops.values()):.3g} FLOP on all devices ("
        + ", ".join(f"{name} {value:.2g}" for name, value in flops.items())
        + ")",
        "Bytes moved by each device: "
        + ", ".join(f"{name} {value:.2g}" for name, value in moved.items()),
        f"Of the positions that the learner computes {real_share(plan):.0%} hold a token; prompts: "
        + plan.work.lengths.source,
    ]


def _seconds(plan: Plan) -> list[str]:
    """Predictions, what they assume, and what would be faster."""
    work = plan.work
    lines = [
        "Predicted seconds of an iteration, grading left out",
        f"  {'':10}{'total':>8}{'rollout':>9}{'score':>8}{'update':>8}",
    ]
    for name, phases in predictions(plan).items():
        rollout = phases["prefill"] + phases["decode"]
        lines.append(
            f"  {name:10}{sum(phases.values()):8.0f}{rollout:9.0f}{phases['score']:8.0f}"
            f"{phases['update']:8.0f}"
        )
    lines.append(
        f"  if products reach {ASSUMED.matmul:.0%} of the data sheet's rate, memory "
        f"{ASSUMED.bandwidth:.0%}, links {ASSUMED.links:.0%}, and every trace uses its "
        f"budget up ({work.mean_thinking:.0f} tokens on average)"
    )
    ways = []
    if plan.faster is not None:
        layout, taken = plan.faster
        ways.append(f"mesh.decode_tensor={layout.decode_tensor} (a rollout in {taken:.0f} s)")
    if plan.remat is not None:
        taken = updates_in(plan, plan.remat)
        ways.append(f"model.remat={plan.remat} (updates in {taken:.0f} s)")
    if ways:
        lines.append(f"Faster here, and it fits: {', '.join(ways)}")
    if work.evaluated:
        lines.append(
            f"An evaluation: {sum(rows for call in work.evaluated for rows, _ in call):,} answers "
            f"in {len(work.evaluated)} calls (a set's budgets, greedy and sampled, share "
            f"{work.evaluation.slots} slots), "
            f"{plan.evaluation / 60:.0f} minutes"
        )
    return lines
