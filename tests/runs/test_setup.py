"""What a run's config asks of its model and devices, checked before anything is put on them."""

import contextlib
import dataclasses
import json

import pytest

import hf_world
from bacr_jax.config import (
    BudgetConfig,
    Config,
    DistillConfig,
    EvalConfig,
    MeshConfig,
    ModelConfig,
    RolloutConfig,
    TrainConfig,
)
from bacr_jax.config.settings import resolve
from bacr_jax.errors import UserError
from bacr_jax.model.hf import hf_config
from bacr_jax.model.sizes import PRESETS
from bacr_jax.parallel import MeshShape
from bacr_jax.runs.setup import (
    attention_for,
    check_allowance,
    check_model,
    decoding_mesh,
    mesh_shape,
    model_shape,
    positions_needed,
    vocabulary_rows,
)

SHAPE = dataclasses.replace(PRESETS["qwen2.5-7b"], vocab_size=257)


def test_a_custom_model_has_its_tokenizers_rows_and_a_preset_its_own():
    custom = Config(model=ModelConfig(hidden_size=48, num_heads=4, num_kv_heads=2))
    shape = model_shape(custom.model, 29)
    assert (shape.vocab_size, shape.hidden_size, shape.head_dim) == (29, 48, 12)
    preset = Config(model=ModelConfig(preset="qwen2.5-7b"))
    assert model_shape(preset.model, 29) == PRESETS["qwen2.5-7b"]
    assert vocabulary_rows(preset.model, 151665) == 152064
    with pytest.raises(UserError, match="has 152065 token ids, .* only 152064 embedding rows"):
        vocabulary_rows(preset.model, 152065)


@pytest.mark.parametrize(
    ("tokenizer", "says"),
    [
        (
            None,
            "model.path={}: the tokenizer has 258 token ids, but the model has only 257 embedding",
        ),
        ("t", "model.tokenizer=t: the tokenizer has 258 token ids, but model.path={} has only 257"),
    ],
)
def test_more_ids_than_a_folder_has_rows_are_said_of_the_keys_that_name_them(
    tmp_path, tokenizer, says
):
    (tmp_path / "config.json").write_text(json.dumps(hf_config.to_json(SHAPE, dtype="float32")))
    config = Config(model=ModelConfig(path=str(tmp_path), tokenizer=tokenizer))
    with pytest.raises(UserError) as refused:
        vocabulary_rows(config.model, 258)
    assert str(refused.value).startswith(says.format(tmp_path))


def test_rows_longer_than_the_model_was_made_for_are_refused():
    config = Config(
        budget=BudgetConfig(max=1000),
        eval=EvalConfig(budgets=(1000,)),
        rollout=RolloutConfig(answer_tokens=24),
    )
    shape = model_shape(config.model, 29)
    settings = resolve(config).policy
    check_model(settings, shape, longest_prompt=shape.max_positions - 1028, suffix_length=4)
    with pytest.raises(UserError, match="budget.max=1000: .* leave 999 for thinking; set at mo"):
        check_model(settings, shape, longest_prompt=shape.max_positions - 1027, suffix_length=4)


def test_every_part_of_a_trace_needs_positions():
    parts = {"prompt": 1, "thinking": 10, "grace": 100, "forced": 1000, "answers": 10000}
    assert positions_needed(**parts) == 11111


def test_a_teacher_has_the_policys_vocabulary(tmp_path):
    folder = tmp_path / "teacher"
    hf_world.make_folder(folder)
    vocabulary = hf_world.TINY.vocab_size
    config = Config(distill=DistillConfig(coef=1.0, teacher=str(folder)))
    check_model(resolve(config).policy, model_shape(config.model, vocabulary), 8, 0)
    says = rf"distill\.teacher=.* has {vocabulary} tokens, but that of the policy has 29; use"
    with pytest.raises(UserError, match=says):
        check_model(resolve(config).policy, model_shape(config.model, 29), 8, 0)
    gone = dataclasses.replace(
        config, distill=DistillConfig(coef=1.0, teacher=str(tmp_path / "no"))
    )
    with pytest.raises(UserError, match="distill.teacher"):
        check_model(resolve(gone).policy, model_shape(gone.model, vocabulary), 8, 0)


def test_cudnn_is_taken_by_itself_where_every_gpu_can_and_refused_where_none_can():
    def chosen(wanted="auto", dtype="bfloat16", head_dim=128, backend="gpu"):
        config = Config(model=ModelConfig(compute_dtype=dtype))
        return attention_for(config.model.compute_dtype, head_dim, backend, wanted)

    assert chosen() == chosen(head_dim=64) == "cudnn"
    assert chosen(head_dim=100) == chosen(head_dim=136) == chosen(head_dim=12) == "xla"
    assert chosen(dtype="float32") == chosen(backend="cpu") == "xla"
    assert chosen("cudnn", backend="cpu") == "cudnn" and chosen("xla") == "xla"
    for section, head_dim, refused in (
        ("model", 100, True),
        ("rollout", 264, True),
        ("model", 256, False),
    ):
        sections = {"model": {"head_dim": head_dim}, "rollout": {}}
        sections[section]["attention"] = "cudnn"
        config = Config(
            model=ModelConfig(**sections["model"]), rollout=RolloutConfig(**sections["rollout"])
        )
        line = (
            f"^{section}.attention=cudnn .* but the head dimension of the model is "
            f"{head_dim}; set {section}.att"
        )
        with pytest.raises(UserError, match=line) if refused else contextlib.nullcontext():
            check_model(resolve(config).policy, model_shape(config.model, 29), 8, 0)


def layout(devices=8, **sections):
    config = Config(
        **{
            "model": ModelConfig(num_heads=4, num_kv_heads=2),
            "rollout": RolloutConfig(questions=8, group_size=4),
            **sections,
        }
    )
    return mesh_shape(resolve(config).policy, model_shape(config.model, 29), devices)


def test_rows_and_micro_batches_that_divide_are_accepted():
    assert layout() == MeshShape(1, 8, 1, 1)
    train = TrainConfig(minibatches=2, micro_batch_rows=8)
    assert layout(mesh=MeshConfig(data=2, tensor=2), train=train) == MeshShape(2, 2, 2, 2)
    # Micro-batches by tokens are filled up with empty rows.
    train = TrainConfig(minibatches=8, micro_batch_tokens=100)
    assert layout(train=train).row_shards == 8


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"rollout": RolloutConfig(questions=5, group_size=4)},
            r"rollout\.questions=5 x rollout.group_size=4 = 20 traces .* mesh.data x mesh.fsdp = 8 "
            "devices; set rollout.questions=4",
        ),
        ({"train": TrainConfig(minibatches=8)}, "train.minibatches=8: .* train.minibatches=4"),
        (
            {"train": TrainConfig(minibatches=1, micro_batch_rows=4)},
            "train.micro_batch_rows=4: .* set train.micro_batch_rows=8",
        ),
        (
            {"train": TrainConfig(minibatches=1, micro_batch_tokens=100, padding_free=True)},
            "train.padding_free=true works on a single device only, but this run uses 8; set "
            "train.padding_free=false",
        ),
        ({"mesh": MeshConfig(tensor=4)}, "mesh.tensor=4 does not divide .*2 key/value heads"),
        ({"mesh": MeshConfig(data=3)}, "whose product is not the number of devices, 8; set"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_that_does(sections, says):
    with pytest.raises(UserError, match=says):
        layout(**sections)


def test_a_micro_batch_holds_the_longest_row():
    """A prompt of 5, 16 tokens of thinking, 3 in which a cut waits, and answers of 7."""
    row = {"budget": BudgetConfig(min=4, max=16, grace=3)}
    limits = resolve(Config(**row)).limits
    check_allowance(31, limits, 5, 7)
    with pytest.raises(UserError) as refused:
        check_allowance(30, limits, 5, 7)
    assert str(refused.value) == (
        "train.micro_batch_tokens=30: a trace may have 31 tokens (5 of the prompt, 19 of thinking, "
        "7 of answers), which must fit into one micro-batch; set it to at least 31, or set a "
        "smaller budget.max"
    )


@pytest.mark.parametrize("questions", range(1, 20))
def test_the_questions_offered_are_legal(questions):
    ask = lambda count: layout(
        rollout=RolloutConfig(questions=count, group_size=6), train=TrainConfig(minibatches=1)
    )
    try:
        ask(questions)
    except UserError as error:
        offered = int(str(error).rpartition("=")[2])
        ask(offered)
        assert abs(offered - questions) <= 4


@pytest.mark.parametrize(
    ("mesh", "kv_heads", "devices", "expected"),
    [
        (MeshConfig(tensor=2), 4, 8, (4, 2, 1, 2)),
        (MeshConfig(decode_tensor=4), 4, 8, (2, 4, 1, 4)),
        (MeshConfig(), 4, 8, (8, 1, 1, 1)),
        # Four can't share a copy evenly among six, nor any share heads that are not there.
        (MeshConfig(decode_tensor=4), 4, 6, (3, 2, 1, 2)),
        (MeshConfig(decode_tensor=4), 1, 8, (8, 1, 1, 1)),
    ],
)
def test_devices_that_only_decode_share_copies_as_in_the_run(mesh, kv_heads, devices, expected):
    config = Config(model=ModelConfig(num_heads=4, num_kv_heads=kv_heads), mesh=mesh)
    assert decoding_mesh(config.mesh, model_shape(config.model, 29), devices) == expected
