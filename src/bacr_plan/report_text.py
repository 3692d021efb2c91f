"""Formats a plan as text for a terminal."""

from collections.abc import Sequence

from bacr_jax.config.settings import resolve
from bacr_jax.config.values import shown
from bacr_jax.methods import load_method
from bacr_jax.training.run_summary import trained_budgets, untrained_budgets
from bacr_plan import costs, memory, schedule, seconds
from bacr_plan.devices import GIB, MEMORY_FRACTION, PER_HOST
from bacr_plan.report import Plan, parts
from bacr_plan.search import Choice
from bacr_plan.seconds import ASSUMED, POLICY_BANDWIDTH, DeviceSplit

_PHASE_NAMES = {
    "rollout": "rollout (state, decode copy, cache, temporaries)",
    "score": "scoring (state, temporaries)",
    "update": "update (state, gradients, activations)",
    "evaluation": "evaluation (state, decode copy, cache, temporaries)",
    "warmup": "warm-up (weights in float32, gradients, activations)",
    "warmup_accuracy": "accuracy of the warm-up (state, decode copy, cache)",
}


def as_text(plan: Plan) -> str:
    """Formats the plan as text for a terminal."""
    together = sum(plan.predictions[plan.device_name].values())
    lines = [
        *_size_lines(plan),
        "",
        *_memory_lines(plan),
        *_host_memory_lines(plan),
        "",
        *_fit_lines(plan),
        _largest_line(plan),
        *_adapter_lines(plan),
        "",
        *_work_lines(plan),
        "",
        *_seconds_lines(plan),
        *split_lines(plan.splits, together, accepts_async=plan.accepts_async),
    ]
    return "\n".join(lines)


def _size_lines(plan: Plan) -> list[str]:
    """Describes the model, the devices, the number of traces and how the memory was determined."""
    work = plan.work
    layout = plan.layout
    parameters = costs.policy_parameters(work) / 1e9
    mesh = f"data {layout.data}, fsdp {layout.fsdp}, tensor {layout.tensor}"
    settings = resolve(work.config).method
    method = load_method(settings)
    return [
        f"Model    {parameters:.2f}e9 parameters ({work.shape_source})",
        f"Devices  {layout.num_devices} x {plan.device.name}, {plan.memory_gib:g} GiB; {mesh}, "
        f"decode tensor {layout.decode_tensor} (--devices N for another number)",
        f"Traces   {work.rows} per iteration, {work.micro_rows} per micro-batch, {work.slots} "
        f"decoding slots; up to {work.prompt} tokens of prompt, {work.thinking} of thinking, and "
        f"{work.cuts} x {work.branch} of answers",
        f"Trained  {trained_budgets(settings, method)}",
        f"Memory   {plan.compilation.source}",
        *untrained_budgets(settings, method),
    ]


def _host_memory_lines(plan: Plan) -> list[str]:
    """Describes the host memory of the snapshot for `train.undo_*`. Empty if it is not used."""
    snapshot = memory.host_snapshot_bytes(plan.work)
    if not snapshot:
        return []
    return [
        "",
        f"Memory of all hosts: {snapshot / GIB:.2f} GiB for the state before an update "
        "(train.undo_closed_answers, train.undo_filled_budgets)",
    ]


def _memory_lines(plan: Plan) -> list[str]:
    """Formats the tables of memory by purpose and by phase."""
    lines = ["Per device, GiB"]
    for name, size in parts(plan).items():
        lines.append(f"  {name.replace('_', ' '):52}{size / GIB:7.2f}")
    lines += ["", "Peak of each phase, GiB"]
    for name, meaning in _PHASE_NAMES.items():
        if name not in plan.phases:
            continue
        if name == "score" and not plan.work.scored:
            continue
        lines.append(f"  {meaning:52}{plan.phases[name].peak / GIB:7.2f}")
    return lines


def _fit_lines(plan: Plan) -> list[str]:
    """Describes whether the run fits and, if not, with which settings it would fit."""
    peak = f"{plan.peak / GIB:.1f}"
    share = f"{MEMORY_FRACTION:.0%} of {plan.memory_gib:g}"
    limit = f"{plan.limit / GIB:.1f} GiB ({share}, which bacr train sets for JAX)"
    if plan.fits:
        spare = (plan.limit - plan.peak) / GIB
        return [f"FITS: peak {peak} of {limit}, {spare:.1f} GiB to spare"]
    excess = (plan.peak - plan.limit) / GIB
    lines = [f"DOES NOT FIT: peak {peak} of {limit}, {excess:.1f} GiB too much"]
    if plan.suggestion is not None:
        return lines + _choice_lines("Settings that fit on these devices", plan.suggestion)
    count = plan.layout.num_devices
    lines.append(
        f"No mesh, micro-batch and number of slots fits on {count} of these, not even with one "
        "trace per device."
    )
    if plan.larger is not None:
        title = f"Settings that fit on {plan.larger.layout.num_devices} of these devices"
        lines += _choice_lines(title, plan.larger)
    if plan.larger_gpu is not None:
        name, choice = plan.larger_gpu
        lines += _choice_lines(f"Settings that fit on the same number of {name}", choice)
    if plan.larger is None and plan.larger_gpu is None:
        lines.append("It does not fit on more of these devices, or on a larger known GPU, either.")
    if plan.fits_without_warmup:
        lines.append(
            "Only the warm-up is too large: run it once on devices on which it fits, and set "
            "warmup.dir to its folder."
        )
    return lines


def _choice_lines(title: str, choice: Choice) -> list[str]:
    """Formats a choice of settings as two lines: title with peak memory, and config keys."""
    return [
        f"{title} ({choice.peak / GIB:.1f} GiB):",
        f"  {choice.overrides()}",
    ]


def _largest_line(plan: Plan) -> str:
    """Describes the largest micro-batch and the numbers of decoding slots that fit."""
    work = plan.work
    keys = work.micro_batch(plan.largest["micro_rows"])
    keys["rollout.slots"] = plan.largest["slots"]
    if work.evaluated:
        keys["eval.slots"] = plan.largest["eval_slots"]
    fitting = [f"{key}={rows}" for key, rows in keys.items() if rows]
    # A key with 0 rows is not a valid setting, so it is reported separately.
    too_large = [key for key, rows in keys.items() if not rows]
    sentences = []
    if fitting:
        sentences.append(f"Largest on this mesh: {', '.join(fitting)}")
    if too_large:
        names = " and ".join(too_large)
        sentences.append(f"On this mesh no {names} fits, not even with one trace per device")
    return "; ".join(sentences)


def _adapter_lines(plan: Plan) -> list[str]:
    """Describes the number of trained parameters. Empty if the run has no adapters."""
    if not plan.work.adapters:
        return []
    million = costs.trained_parameters(plan.work) / 1e6
    return [
        f"Trained: {million:.1f}e6 parameters of adapters, with a frozen base; the sampler uses a "
        "copy of the model with the adapters merged"
    ]


def _work_lines(plan: Plan) -> list[str]:
    """Describes the number of floating-point operations and the fraction of padding."""
    flops = costs.step_flops(plan.work, plan.iteration)
    by_phase = ", ".join(f"{name} {count:.2g}" for name, count in flops.items())
    share = schedule.real_share(plan.work, plan.iteration.updates)
    return [
        f"Operations per iteration: {sum(flops.values()):.3g} FLOP on all devices ({by_phase})",
        f"{share:.0%} of the positions that the learner computes contain a token; prompt lengths: "
        f"{plan.work.lengths.source}",
    ]


def _seconds_lines(plan: Plan) -> list[str]:
    """Formats the predicted durations, their assumptions and faster settings."""
    layers = plan.work.model.num_layers
    shortest_step_ms = 1e3 * layers * ASSUMED.launch
    lines = [
        "Predicted seconds per iteration, without grading",
        f"  {'':10}{'total':>8}{'rollout':>9}{'score':>8}{'update':>8}",
    ]
    for name, phases in plan.predictions.items():
        total = _short(sum(phases.values()))
        rollout = _short(phases["prefill"] + phases["decode"])
        score = _short(phases["score"])
        update = _short(phases["update"])
        lines.append(f"  {name:10}{total:>8}{rollout:>9}{score:>8}{update:>8}")
    lines.append(
        f"  assuming that matrix products reach {ASSUMED.matmul:.0%} of the data sheet's rate, "
        f"memory {ASSUMED.bandwidth:.0%}, links {ASSUMED.links:.0%}, {_network(plan)}a decoding "
        f"step takes at least {shortest_step_ms:.2g} ms ({layers} layers x "
        f"{ASSUMED.launch * 1e6:.0f} us to launch their kernels, measured once, on an H200), and "
        "every trace uses its full budget "
        f"({plan.work.lengths.thinking.mean():.0f} tokens on average)"
    )
    lines += [f"  {line}" for line in plan.not_counted]
    ways = _faster_ways(plan)
    if ways:
        lines.append(f"Faster settings that fit: {', '.join(ways)}")
    return lines + _warmup_lines(plan) + _evaluation_lines(plan)


def _network(plan: Plan) -> str:
    """Describes the assumed network between machines. Empty if one machine is enough."""
    if plan.layout.num_devices <= PER_HOST:
        return ""
    gigabytes = plan.device.network_bandwidth / 1e9
    return (
        f"the network between machines of {PER_HOST} GPUs {ASSUMED.links:.0%} of {gigabytes:g} "
        "GB/s per GPU (--network), "
    )


def _short(value: float) -> str:
    """Formats seconds as an integer from 10 on, and smaller values with two significant digits."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _faster_ways(plan: Plan) -> list[str]:
    """Describes the faster settings, each with the resulting duration."""
    ways = []
    if plan.faster is not None:
        layout, rollout_seconds = plan.faster
        key = f"mesh.decode_tensor={layout.decode_tensor}"
        ways.append(f"{key} (rollout in {rollout_seconds:.3g} s)")
    if plan.remat is not None:
        remat, update_seconds = plan.remat
        ways.append(f"model.remat={remat} (update in {update_seconds:.3g} s)")
    if plan.less_padding is not None:
        keys, update_seconds = plan.less_padding
        settings = " ".join(f"{key}={shown(value)}" for key, value in keys.items())
        ways.append(f"{settings} (update in {update_seconds:.3g} s)")
    return ways


def _warmup_lines(plan: Plan) -> list[str]:
    """Describes the duration of the warm-up. Empty if the run has no warm-up."""
    work = plan.work
    if work.warmup is None:
        return []
    warmup = work.config.warmup
    minutes = seconds.warmup_seconds(work, plan.layout, plan.device) / 60
    return [
        f"Warm-up before the first iteration: {warmup.steps:,} steps of {work.warmup_tokens:,} "
        f"tokens, {minutes:.3g} minutes, without the up to {warmup.max_hold} further "
        "rounds and without measuring the accuracy"
    ]


def _evaluation_lines(plan: Plan) -> list[str]:
    """Describes the duration of an evaluation. Empty if the run has no evaluation sets."""
    work = plan.work
    if not work.evaluated:
        return []
    answers = sum(rows for call in work.evaluated for rows, _ in call)
    minutes = seconds.evaluation_seconds(work, plan.layout, plan.device) / 60
    return [
        f"One evaluation: {answers:,} answers in {len(work.evaluated)} calls (all budgets of a "
        f"set, greedy and sampled, share {work.evaluation.slots} slots), {minutes:.3g} minutes"
    ]


def split_lines(
    all_splits: Sequence[DeviceSplit], together: float, *, accepts_async: bool
) -> list[str]:
    """Describes the best splits, and compares them with a run that does not split the devices.

    Args:
      all_splits: the splits. If empty, no lines are returned.
      together: duration of an iteration in seconds if all devices alternate between sampling and
        learning.
      accepts_async: True if the run accepts `rollout.async_steps=1`. Otherwise this setting is left
        out.
    """
    if not all_splits:
        return []
    in_turn = min(all_splits, key=lambda split: split.in_turn)
    ways = {
        "all in turn, own decoder": together,
        f"in turn: {_split_text(in_turn)}": in_turn.in_turn,
    }
    if accepts_async:
        ahead = min(all_splits, key=lambda split: split.ahead)
        ways[f"rollout.async_steps=1: {_split_text(ahead)}"] = ahead.ahead
    fastest = min(ways, key=lambda way: ways[way])
    lines = [f"  {way:52}{duration:8.0f}" for way, duration in ways.items()]
    return [
        "",
        "Seconds of an iteration if servers of vLLM sample on some of the devices",
        *lines,
        f"  fastest: {fastest}; of each {in_turn.transfer:.0f} s to hand the policy over, at "
        f"{POLICY_BANDWIDTH / 1e9:g} GB/s",
    ]


def _split_text(split: DeviceSplit) -> str:
    """Describes a split by its numbers of devices, such as `6 learn, 2 sample`."""
    return f"{split.learner} learn, {split.samplers} sample"
