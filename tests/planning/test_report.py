"""A plan: arithmetic, what a compiler knows better, and the two ways to print it."""

import dataclasses
import functools
import json

import pytest

from bacr_jax.config import io as config_io
from bacr_jax.config.checks import problems
from bacr_jax.config.shipped import locate
from bacr_jax.methods import registry
from bacr_plan import memory
from bacr_plan.compiling import Compilation, ProgramMemory
from bacr_plan.devices import DEVICES, GIB, MEMORY_FRACTION
from bacr_plan.report import PREDICTED_FOR, Plan, as_object
from bacr_plan.report_text import as_text
from bacr_plan.workload import sizes_of
from plan_world import mesh, workload

ARITHMETIC = Compilation("arithmetic", {}, exact=False)
PROGRAMS = {
    "train": ProgramMemory(arguments=11 * GIB, outputs=0, temporaries=20 * GIB, seconds=1.0),
    "decode": ProgramMemory(arguments=30 * GIB, outputs=0, temporaries=5 * GIB, seconds=1.0),
}

# Warm-up without any target accuracy.
NO_TARGETS = ("warmup.target_accuracy=0", "warmup.hold_accuracy=0")

BOX = mesh()


def planned(*overrides, gib=80, layout=BOX, compilation=None):
    if compilation is None:
        return by_arithmetic(overrides, gib, layout)
    return compiled(overrides, gib, layout, compilation)


@functools.cache
def by_arithmetic(overrides, gib, layout):
    return compiled(overrides, gib, layout, ARITHMETIC)


def compiled(overrides, gib, layout, compilation):
    return Plan(
        workload(*overrides),
        layout,
        device=DEVICES["a100-80"],
        memory_gib=float(gib),
        compilation=compilation,
    )


def test_the_object_answers_every_question():
    answers = json.loads(json.dumps(as_object(planned())))
    assert {
        *("fits", "peak_gib", "limit_gib", "parts_gib", "phases_gib", "flops"),
        *("predicted_step_s", "max_micro_batch", "max_slots", "mesh"),
    } <= answers.keys()
    assert {"parameters", "optimizer", "gradients", "activations", "kv_cache", "decode_copy"} <= (
        answers["parts_gib"].keys()
    )
    assert answers["predicted_step_s"].keys() == {"a100-80", "h100", "h200"}


def test_the_papers_run_fits_one_box():
    plan, answers = planned(), as_object(planned())
    assert plan.fits and answers["peak_gib"] == max(answers["phases_gib"].values())
    # 7,641,406,976 parameters in fp32 over eight devices.
    by_hand = 7_641_406_976 * 4 / 8 / GIB
    assert answers["parts_gib"]["parameters"] == pytest.approx(by_hand, abs=1e-3)
    assert (plan.largest["micro_rows"] >= 16, plan.largest["slots"]) == (True, 512)


def test_it_says_by_how_much_a_run_does_not_fit_and_what_would():
    plan = planned(gib=40, layout=mesh(fsdp=4))
    answers, text = as_object(plan), as_text(plan)
    assert not plan.fits and plan.suggestion is None
    assert f"{(plan.peak - plan.limit) / GIB:.1f} GiB too much" in text
    assert answers["more_devices"]["devices"] == 8
    assert answers["more_devices"]["overrides"] in text


def test_what_it_suggests_fits_when_planned_again():
    fourteen = "model.preset=qwen2.5-14b"
    suggestion = planned(fourteen).suggestion
    overrides = suggestion.overrides().split()
    again = planned(fourteen, *overrides, layout=suggestion.layout)
    assert again.fits and again.peak == suggestion.peak


def test_the_largest_portions_fit_when_planned_again():
    plan = planned()
    micro_rows, slots, evaluated = plan.largest.values()
    most = (f"train.micro_batch_rows={micro_rows}", f"rollout.slots={slots}")
    assert planned(*most, f"eval.slots={evaluated}").fits
    assert not planned(*most, f"eval.slots={evaluated + 8}").fits


def test_an_evaluation_that_alone_does_not_fit_gets_slots_of_its_own():
    """Its slots are refilled, and answered on copies, where training has a slot for every row."""
    phases = planned().phases
    assert phases["evaluation"].peak > phases["rollout"].peak > phases["update"].peak
    gib = (phases["rollout"].peak + phases["evaluation"].peak) / 2 / GIB / MEMORY_FRACTION
    plan = planned(gib=gib)
    assert not plan.fits
    assert plan.suggestion.work.slots == 512 and 0 < plan.suggestion.work.eval_slots < 512
    again = plan.suggestion.overrides().split()
    assert planned(*again, gib=gib, layout=plan.suggestion.layout).fits
    assert "evaluation" not in planned("data.eval=[]", "eval.every=null").phases


def test_a_card_too_small_is_told_what_to_change_in_order():
    """More cards, another card; each with its rows."""
    plan = planned(gib=24, layout=mesh(fsdp=1))
    answers, (first, *lines) = as_object(plan), as_text(plan).partition("DOES NOT")[2].splitlines()
    assert (
        "fits on 1 of these, not even with one trace per device." in lines[0]
        and "GiB too much" in first
    )
    titles = [line.partition(" (")[0] for line in lines if line.startswith("Settings that fit")]
    assert titles == [
        "Settings that fit on 8 of these devices",
        "Settings that fit on the same number of b200",
    ]
    for name in ("more_devices", "larger_card"):
        overrides = answers[name]["overrides"]
        assert "train.micro_batch_rows=" in overrides and "=0" not in overrides


def test_where_nothing_known_would_do_that_is_said():
    text = as_text(planned("model.preset=qwen2.5-72b", gib=0.5))
    assert "It does not fit on more of these devices, or on a larger known GPU, either." in text


@pytest.mark.slow
@pytest.mark.parametrize("memory_gib", [24, 4])
def test_no_portion_of_0_rows_is_named_where_none_fits(memory_gib):
    plan = planned(gib=memory_gib)
    text = as_text(plan)
    assert plan.largest["micro_rows"] == 0 and "=0" not in text
    most = {"rollout.slots": plan.largest["slots"], "eval.slots": plan.largest["eval_slots"]}
    none = [key for key, slots in most.items() if not slots]
    assert (
        f"no {' and '.join(['train.micro_batch_rows', *none])} fits, not even with one trace"
        in text
    )
    assert ("Largest on this mesh: rollout.slots=" in text) == bool(plan.largest["slots"])
    assert all((f"{key}={slots}" in text) == bool(slots) for key, slots in most.items())


def test_the_text_holds_every_number_of_the_object():
    answers, text = as_object(planned()), as_text(planned())
    for gib in (*answers["parts_gib"].values(), *answers["phases_gib"].values()):
        assert f"{gib:.2f}" in text
    for seconds in answers["predicted_step_s"].values():
        assert f"{seconds:.0f}" in text


def test_the_launches_of_a_decoding_step_are_a_printed_assumption():
    """28 layers of 85 microseconds."""
    assert as_object(planned())["assumed_launch_s_per_layer"] == 85e-6
    (line,) = [line for line in as_text(planned()).splitlines() if "assuming that" in line]
    assert "a decoding step takes at least 2.4 ms (28 layers x 85 us to launch" in line
    assert "measured once, on an H200" in line


def test_the_network_between_machines_is_a_printed_assumption():
    """One machine of eight GPUs has no network."""
    keys = (
        *("rollout.questions=2", "train.minibatches=1", "train.micro_batch_rows=16"),
        *("rollout.slots=16", "eval.slots=16", "eval.size=1", "eval.samples=0"),
        *("budget.min=64", "budget.max=512", "eval.budgets=[512]"),
    )
    one, two = planned(*keys), planned(*keys, layout=mesh(data=2))
    assert "--network" not in as_text(one)
    assert as_object(two)["assumed_network_gb_per_s"] == 25
    line = "links 70%, the network between machines of 8 GPUs 70% of 25 GB/s per GPU (--network), "
    assert line in as_text(two)
    # Another network changes the seconds of all GPU models, and not the name of the plan's.
    slow = dataclasses.replace(two, device=dataclasses.replace(two.device, network_bandwidth=1e9))
    assert slow.device_name == "a100-80" and "70% of 1 GB/s per GPU" in as_text(slow)
    before, after = as_object(two)["predicted_step_s"], as_object(slow)["predicted_step_s"]
    assert before.keys() == after.keys() and all(after[name] > before[name] + 5 for name in after)


def test_the_gpu_compilers_numbers_are_taken():
    phases = planned(compilation=Compilation("XLA", PROGRAMS, exact=True)).phases
    assert phases["update"].peak == 31 * GIB
    # Branches have their own cache, 64 rows of 4 x 136 tokens of 57,344 bytes; the state waits.
    branches = 64 * 544 * 57_344
    assert phases["rollout"].peak == (11 + 35) * GIB + branches


def test_a_run_split_by_tokens_keeps_the_state_of_arithmetic():
    keys = ("train.micro_batch_rows=null", "train.micro_batch_tokens=90624")
    update = planned(*keys, compilation=Compilation("XLA", PROGRAMS, exact=True)).phases["update"]
    assert update.resident == memory.state_bytes(workload(*keys), mesh())
    # The sum of earlier gradients is none of the program's temporaries.
    gradient = 4 * 7_641_406_976 / 8
    assert update.temporaries == 20 * GIB + gradient


def test_of_the_cpu_compilers_numbers_only_arguments_are_taken():
    cpu = planned(compilation=Compilation("XLA for CPUs", PROGRAMS, exact=False)).phases
    own = planned().phases
    assert cpu["update"].resident == cpu["score"].resident == 11 * GIB
    assert cpu["update"].temporaries == own["update"].temporaries
    assert cpu["rollout"].temporaries == own["rollout"].temporaries


def test_what_is_faster_and_fits_is_named_with_its_seconds():
    plan = planned()
    answers, text = as_object(plan), as_text(plan)
    assert answers["faster"]["mesh.decode_tensor"] == 4
    assert answers["less_remat"]["model.remat"] == "selective"
    assert answers["less_remat"]["update_s"] < answers["predicted_s_by_phase"]["a100-80"]["update"]
    assert "Faster settings that fit: mesh.decode_tensor=4 (" in text
    assert "model.remat=selective (update in " in text
    # With 29 GiB there is room for neither.
    tight = planned("rollout.slots=64", gib=45)
    assert tight.fits and tight.remat is None


@pytest.mark.parametrize("device", PREDICTED_FOR)
@pytest.mark.parametrize("remat", ["full", "selective", "none"])
def test_no_setting_is_called_faster_that_is_predicted_equally_fast(device, remat):
    """`none` and `selective` are predicted to take the same time."""
    plan = dataclasses.replace(planned(f"model.remat={remat}", gib=200), device=DEVICES[device])
    assert plan.fits
    answers, text = as_object(plan), as_text(plan)
    current = answers["predicted_s_by_phase"][device]
    changed = [answers[name] for name in ("less_remat", "less_padding") if answers[name]]
    assert all(one["update_s"] < 0.96 * current["update"] for one in changed)
    if answers["faster"]:
        assert answers["faster"]["rollout_s"] < 0.96 * (current["prefill"] + current["decode"])
    assert (answers["less_remat"] is not None) == (remat == "full")
    assert ("model.remat=" in text) == (remat == "full")


ROUNDS = "  rollout: 1 to 4 rounds, one is counted, because dynamic sampling "
STAGE = "  not counted: the first supervised stage of method=selfbudgeter, which answers "
DAPO = ("dapo.dynamic_sampling=true", "dapo.max_rounds=4")


@pytest.mark.parametrize(
    ("method", "keys", "start"),
    [
        ("grpo", (), None),
        ("bacr-robust", (), None),
        ("dapo", DAPO, ROUNDS),
        ("dler", DAPO, ROUNDS),
        ("dapo", ("dapo.dynamic_sampling=false",), None),
        ("dapo", ("dapo.max_rounds=1",), None),
        ("selfbudgeter", (), f"{STAGE}every training question once and trains for 200 steps"),
        ("selfbudgeter", ("selfbudgeter.cold_start_questions=1000",), f"{STAGE}1,000 training "),
    ],
)
def test_what_the_seconds_do_not_count_is_said(method, keys, start):
    config = config_io.load([locate("qwen2.5-7b-math"), locate(f"methods/{method}")], keys)
    plan = plan_of(config, 8, 80)
    lines = as_object(plan)["not_counted"]
    printed = as_text(plan).splitlines()
    assert len(lines) == (start is not None)
    assert [line for line in printed if "counted" in line] == [f"  {line}" for line in lines]
    if start is not None:
        (line,) = lines
        assert f"  {line}".startswith(start)
        # It is printed with the other assumptions, below the table.
        (number,) = [i for i, text in enumerate(printed) if text.startswith("  assuming that ")]
        assert printed[number + 1] == f"  {line}"


ASYNC = (
    *("rollout.engine=vllm", "rollout.urls=[http://one:1]", "rollout.async_steps=1"),
    "loss.importance_cap=2",
)
METHODS = [path.stem for path in locate("methods/grpo").parent.glob("*.yaml")]


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        *((method, ()) for method in sorted(METHODS)),
        ("dapo", ("dapo.dynamic_sampling=false",)),
        ("grpo", ("train.undo_closed_answers=0.9",)),
        ("grpo", ("train.undo_filled_budgets=0.9",)),
    ],
)
def test_a_plan_knows_which_runs_refuse_async_rollouts(method, keys):
    files = [locate("quickstart"), locate(f"methods/{method}")]
    lines = problems(config_io.load(files, [*keys, *ASYNC]), also=registry.problems)
    refuses = any("rollout.async_steps=1" in line for line in lines)
    assert plan_of(config_io.load(files, keys), 1, 80).accepts_async == (not refuses)


@pytest.mark.parametrize(("method", "accepts"), [("dapo", False), ("grpo", True)])
def test_async_rollouts_are_only_compared_for_runs_that_accept_them(method, accepts):
    config = config_io.load([locate("quickstart"), locate(f"methods/{method}")], [])
    plan = plan_of(config, 2, 80)
    assert plan.accepts_async == accepts
    assert ("rollout.async_steps=1" in as_text(plan)) == accepts
    splits = as_object(plan)["predicted_splits_s"]
    assert splits and all((split["ahead"] is not None) == accepts for split in splits)


def test_a_run_that_fits_but_for_its_warm_up_does_not_fit():
    """Adapters train 1 % of the weights, the warm-up before them trains all."""
    keys = ("adapter.rank=16", "rollout.slots=64", "eval.slots=64")
    assert planned(*keys, gib=24).fits
    warmup = ("warmup.steps=500", "warmup.batch_tokens=65536")
    plan = planned(*keys, *warmup, gib=24)
    of_warmup = {name for name, phase in plan.phases.items() if phase.peak > plan.limit}
    assert not plan.fits and of_warmup <= {"warmup", "warmup_accuracy"}
    roomy = planned(*keys, *warmup, gib=80)
    answers, text = as_object(roomy), as_text(roomy)
    assert roomy.fits and answers["predicted_warmup_s"] > 0
    assert {"warmup", "warmup_accuracy"} <= answers["phases_gib"].keys()
    assert "Warm-up before the first iteration: 500 steps of 65,536 tokens, " in text
    nothing = as_object(planned())
    assert nothing["predicted_warmup_s"] == 0 and "warmup" not in nothing["phases_gib"]


def plan_of(config, devices, gib):
    work, layout = sizes_of(config, devices)
    return Plan(work, layout, DEVICES["a100-80"], float(gib), ARITHMETIC)


def test_faster_settings_are_accepted_by_training():
    """The config sets micro_batch_rows, which excludes micro_batch_tokens."""
    config = config_io.load([locate("qwen2.5-1.5b-80gb")], [])
    keys = as_object(plan_of(config, 1, 80))["less_padding"]
    assert keys.pop("update_s") > 0 and keys["train.micro_batch_rows"] is None
    changed = config_io.override(config, [f"{key}={json.dumps(keys[key])}" for key in keys])
    config_io.check(changed)


def test_settings_for_more_devices_are_accepted_by_training():
    """The config leaves out padding, which only a single device can do."""
    config = config_io.load([locate("qwen2.5-0.5b-gsm8k-24gb")], [])
    choice = plan_of(config, 1, 8).larger
    assert choice.layout.num_devices > 1
    assert "train.padding_free=false" in choice.overrides()
    changed = config_io.override(config, choice.overrides().split())
    sizes_of(changed, choice.layout.num_devices)


@pytest.mark.parametrize(("gib", "is_said"), [(24, False), (100, True)])
def test_only_the_warm_up_is_too_large_is_said_if_the_rest_fits(gib, is_said):
    """The warm-up of adapters trains all weights. On 24 GiB the rest of the run does not fit."""
    keys = ("warmup.steps=10", "warmup.batch_tokens=65536", *NO_TARGETS, "adapter.rank=16")
    plan = planned(*keys, gib=gib, layout=mesh(fsdp=1))
    assert plan.suggestion is None
    assert ("Only the warm-up is too large" in as_text(plan)) == is_said


@pytest.mark.parametrize(
    ("keys", "is_measured"),
    [
        (("warmup.target_accuracy=0", "warmup.hold_accuracy=0"), False),
        (("warmup.target_accuracy=0.5", "warmup.hold_accuracy=0"), True),
        (("warmup.target_accuracy=0", "warmup.hold_accuracy=0.5"), True),
        # A file of questions with the traces of one column, and of two.
        ((*NO_TARGETS, "data.train=x.jsonl", "data.trace_column=short"), False),
        ((*NO_TARGETS, "data.train=x.jsonl", "data.trace_column=[short,full]"), True),
        # A generated task has several styles, of which the config may choose one.
        ((*NO_TARGETS, "data.train=gym:chain_sum"), True),
        ((*NO_TARGETS, "data.train=gym:chain_sum", "warmup.styles={steps: 1}"), False),
    ],
)
def test_only_a_warm_up_that_measures_an_accuracy_has_memory_for_it(keys, is_measured):
    work = workload("data.train=gsm8k", "warmup.steps=5", *keys)
    phases = memory.warmup_phases(work, BOX)
    assert "warmup" in phases
    assert ("warmup_accuracy" in phases) == is_measured


def test_leaving_padding_out_is_weighed_on_one_device():
    """Rows think 1,024 to 4,096 tokens: by rows every one is computed as the longest."""
    keys = ("model.preset=qwen2.5-0.5b", "model.path=null", "rollout.slots=64", "eval.slots=64")
    keys += ("budget.min=64", "train.micro_batch_rows=8")
    plan = planned(*keys, layout=mesh(fsdp=1))
    answers = as_object(plan)
    assert plan.fits and answers["less_padding"]["train.padding_free"] is True
    tokens = answers["less_padding"]["train.micro_batch_tokens"]
    assert tokens >= 8 * plan.work.row_tokens
    assert (
        answers["less_padding"]["update_s"] < answers["predicted_s_by_phase"]["a100-80"]["update"]
    )
    assert f"train.micro_batch_tokens={tokens} train.padding_free=true (update in " in as_text(plan)
    # Planned again with these keys it takes as long as predicted, and no padding is left.
    work = plan.work.by_real_tokens(tokens, padding_free=True)
    again = dataclasses.replace(plan, work=work)
    assert again.fits and as_object(again)["less_padding"] is None
    taken = again.predictions["a100-80"]["update"]
    assert taken == pytest.approx(answers["less_padding"]["update_s"], abs=0.1)


def test_several_devices_are_told_of_micro_batches_by_tokens_alone():
    found = as_object(planned("budget.min=64"))["less_padding"]
    assert found is not None and "train.padding_free" not in found
    tokens = planned("train.micro_batch_rows=null", "train.micro_batch_tokens=90624")
    assert as_object(tokens)["less_padding"] is None


def test_copies_of_the_state_are_listed_where_there_are_some():
    plain = planned()
    keys = ("optimizer.max_update_kl=0.01", "train.undo_filled_budgets=0.9")
    guarded = planned(*keys)
    assert as_object(plain)["host_gib"] == 0.0 and "Memory of all hosts" not in as_text(plain)
    copy = as_object(guarded)["parts_gib"]["parameters_before_update"]
    assert copy == as_object(guarded)["parts_gib"]["parameters"]
    before, after = (as_object(one)["phases_gib"]["update"] for one in (plain, guarded))
    assert after - before == pytest.approx(copy, abs=2e-3)
    assert "Memory of all hosts: " in as_text(guarded)
