"""The PyTorch model that an export brings along: the same policy, told the same budgets."""

import importlib
import shutil
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import hf_world
from bacr_client.fingerprint import write_manifest
from bacr_jax.config import ConditioningConfig
from bacr_jax.errors import UserError
from bacr_jax.export import policy_folder
from bacr_jax.model import budget
from bacr_jax.model.hf import hf_config, reading

torch = pytest.importorskip(
    "torch", reason="live parity needs torch: pip install -e '.[parity]' (golden files do without)"
)
transformers = pytest.importorskip("transformers")

from bacr_jax.export import budget_generation  # noqa: E402 (it imports torch)

TOKENS = np.random.default_rng(0).integers(1, 89, (3, 14)) % 37
LENGTHS = np.array([14, 9, 4])
PER_LAYER = ConditioningConfig(sharing="per_layer", input="log", gate="tanh")
# Every family, and every way to be told a budget.
CONDITIONINGS = {
    "paper": ("qwen2", ConditioningConfig()),
    "per layer, log, tanh": ("qwen2", PER_LAYER),
    "normed": (
        "qwen2",
        ConditioningConfig(input="normalised", gate="sigmoid_normed", gate_bias=-1.0),
    ),
    "response only": ("qwen2", ConditioningConfig(positions="response")),
    "qwen3": ("qwen3", PER_LAYER),
    "llama": ("llama", ConditioningConfig()),
}

# How a budget is held that no row uses up.
UNUSED = {"states": 2, "jumps": []}
THINKING = {
    "closing_ids": [0],
    "answer_ids": [0],
    "end_ids": [],
    "never_sampled": "",
    "think_close": UNUSED,
    "answer_close": UNUSED,
    "answer_tokens": 1,
    "grace": 0,
    "cap": 4096,
}


def of_torch(model, **how):
    with torch.no_grad():
        return model(torch.tensor(TOKENS), **how).logits.numpy()


@pytest.fixture(scope="module", autouse=True)
def own_modules(tmp_path_factory):
    """Code that transformers copies before it runs it, kept out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        modules = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
        patch.syspath_prepend(modules)
        yield


def reloaded(folder):
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, trust_remote_code=True).eval()


@pytest.fixture(scope="module", params=CONDITIONINGS)
def told(request, tmp_path_factory):
    """The exported PyTorch model with a budget module that does something, and ours."""
    kind, how = CONDITIONINGS[request.param]
    config = hf_world.FAMILIES[kind]
    params = hf_world.random_params(config, conditioning=how)
    out = tmp_path_factory.mktemp("told") / "out"
    told = policy_folder.BudgetInput(hf_config.BudgetModule(how, 4096), levels={"low": 512})
    policy_folder.save_policy(out, params, config=config, budget=told)
    return reloaded(out), params, config, how, out


@pytest.mark.parametrize("b", [256, 1000, 4096])
def test_the_exported_model_agrees_at_three_budgets(told, b):
    model, params, config, how, _ = told
    mask, extra = None, {}
    if how.positions == "response":
        mask = jnp.asarray(np.arange(14) >= LENGTHS[:, None] - 2)
        extra = {"budget_mask": torch.tensor(np.array(mask))}
    budgets = np.array([b, b - 1, b // 2])
    want = of_torch(model, budget=torch.tensor(budgets), **extra)
    found = hf_world.told_logits(params, TOKENS, budgets, config, how, 4096, mask)
    np.testing.assert_allclose(found, want, atol=1e-4)
    assert np.abs(want - of_torch(model)).max() > 0.1


def test_one_number_is_the_budget_of_every_row(told):
    model, _, _, how, _ = told
    extra = {"budget_mask": torch.ones(3, 14)} if how.positions == "response" else {}
    one = of_torch(model, budget=512, **extra)
    three = of_torch(model, budget=torch.tensor([512] * 3), **extra)
    np.testing.assert_array_equal(one, three)


def test_a_budget_can_have_a_name(told):
    model, _, _, how, out = told
    extra = {"budget_mask": torch.ones(3, 14)} if how.positions == "response" else {}
    named = of_torch(model, budget="low", **extra)
    np.testing.assert_array_equal(named, of_torch(model, budget=512, **extra))
    with pytest.raises(ValueError, match="budget: expected .*level .low.*found 'high'"):
        model(torch.tensor(TOKENS), budget="high", **extra)
    assert hf_config.read_levels(out) == {"low": 512}


def test_without_a_budget_the_exported_model_is_the_plain_one(told):
    model, params, config, _, _ = told
    found = hf_world.logits(params, TOKENS, config)
    np.testing.assert_allclose(found, of_torch(model), atol=1e-4)


def test_the_exported_model_generates_what_we_generate(told, monkeypatch):
    model, params, config, how, _ = told
    monkeypatch.setattr(model.config, "thinking", THINKING)
    rows, budgets = TOKENS[:, :6], np.array([300, 1000, 4096])
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    want = model.generate(torch.tensor(rows), budget=torch.tensor(budgets), **settings)[:, 6:]
    phi = budget.embed(params["budget"], jnp.asarray(budgets), conditioning=how, b_max=4096)
    found = hf_world.greedy(params, list(rows), config, 24, phi, how)
    np.testing.assert_array_equal(found, want.numpy())


@pytest.mark.parametrize("b", [8, None])
def test_a_cache_of_a_prompt_is_refused_because_its_budget_is_not_known(told, monkeypatch, b):
    model, _, _, how, _ = told
    monkeypatch.setattr(model.config, "thinking", THINKING)
    rows = torch.tensor(TOKENS[:, :6])
    settings = {"budget": b, "max_new_tokens": 12, "pad_token_id": 0}
    expected = model.generate(rows, **settings)
    name = budget_generation.CACHE
    cache = transformers.DynamicCache(config=model.config)
    # An empty cache is used, as in transformers.
    found = model.generate(rows, **settings, **{name: cache})
    assert found.tolist() == expected.tolist()
    cache = transformers.DynamicCache(config=model.config)
    extra = {"budget_mask": torch.zeros(3, 4)} if how.positions == "response" else {}
    with torch.no_grad():
        model(rows[:, :4], budget=b, use_cache=True, **extra, **{name: cache})
    message = f"^{name}: the KV cache contains 4 tokens, but this model has a budget embedding"
    with pytest.raises(ValueError, match=message):
        model.generate(rows, **settings, **{name: cache})


def test_a_static_cache_serves_several_calls(told, monkeypatch):
    model = told[0]
    monkeypatch.setattr(model.config, "thinking", THINKING)
    rows = torch.tensor(TOKENS[:, :6])
    for b in (300, 8):
        settings = {"budget": b, "max_new_tokens": 12, "pad_token_id": 0}
        found = model.generate(rows, cache_implementation="static", **settings)
        assert found.tolist() == model.generate(rows, **settings).tolist()


def test_a_folder_that_does_not_say_how_a_budget_is_held_does_not_generate(told):
    with pytest.raises(
        ValueError, match="^config.json: the section 'thinking', .* is missing; export the f"
    ):
        told[0].generate(torch.tensor(TOKENS), budget=512)


def agree(model, other, how):
    extra = {"budget_mask": torch.ones(3, 14)} if how.positions == "response" else {}
    weights = model.state_dict()
    others = other.state_dict()
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    # The same products of two models may be rounded differently, because it depends on where their
    # weights are in memory.
    told_logits = of_torch(model, budget=512, **extra)
    np.testing.assert_allclose(of_torch(other, budget=512, **extra), told_logits, atol=2e-6)


def test_a_folder_that_transformers_saved_again_is_the_same_policy(told, tmp_path):
    """Twice over, as trainers save a model that they loaded."""
    model, _, _, how, _ = told
    for name in ("once", "twice"):
        model.save_pretrained(tmp_path / name)
        assert (tmp_path / name / "modeling_bacr.py").is_file()
        model = reloaded(tmp_path / name)
        agree(told[0], model, how)
        assert hf_config.read_levels(tmp_path / name) == {"low": 512}
    _, params = reading.load_policy(tmp_path / "twice")
    hf_world.same(params, told[1])


def test_the_code_goes_along_however_its_class_was_loaded(told, tmp_path, monkeypatch):
    """By an import of the modelling file too, without transformers' Auto classes."""
    _, _, _, how, out = told
    shutil.copytree(out, tmp_path / "imported_folder")
    (tmp_path / "imported_folder" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    name = type(told[0]).__name__
    monkeypatch.delitem(sys.modules, "imported_folder", raising=False)
    monkeypatch.delitem(sys.modules, "imported_folder.modeling_bacr", raising=False)
    module = importlib.import_module("imported_folder.modeling_bacr")
    getattr(module, name).from_pretrained(out).save_pretrained(tmp_path / "again")
    files = {path.name for path in (tmp_path / "again").iterdir()}
    assert {"modeling_bacr.py", "budget_generation.py"} <= files
    agree(told[0], reloaded(tmp_path / "again"), how)


def test_a_folder_that_was_saved_as_the_plain_model_is_it_with_the_code_beside_it(told, tmp_path):
    """As TRL saves a folder that it loaded without trust_remote_code: without budget tensors."""
    _, _, _, how, out = told
    plain = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    plain.save_pretrained(tmp_path / "plain")
    for name in ("modeling_bacr.py", "budget_generation.py"):
        shutil.copy(out / name, tmp_path / "plain" / name)
    agree_with = reloaded(tmp_path / "plain")
    extra = {"budget_mask": torch.ones(3, 14)} if how.positions == "response" else {}
    logits = of_torch(agree_with, budget=512, **extra)
    np.testing.assert_allclose(logits, of_torch(plain), atol=2e-6)


def test_a_flipped_exponent_bit_in_either_weight_file_is_refused(told, tmp_path):
    """By our reader, and by the modelling file in transformers."""
    folder = tmp_path / "hf"
    shutil.copytree(told[-1], folder)
    write_manifest(folder)
    reading.load_policy(folder)
    for path in sorted(folder.glob("*.safetensors")):
        content = bytearray(path.read_bytes())
        content[-1] ^= 0x20
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"^{path} is not the file that was exported"):
            reading.load_policy(folder)
        with pytest.raises(ValueError, match=f"^{path} is not the file that was exported"):
            type(told[0]).from_pretrained(folder)
        content[-1] ^= 0x20
        path.write_bytes(content)
    assert type(told[0]).from_pretrained(folder).files_checked


def test_without_its_code_the_exported_model_refuses_budgets(told):
    """transformers must not quietly drop the budget."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(told[-1])
    family = type(told[0]).__name__.removeprefix("Bacr")
    assert type(plain) is getattr(transformers, family)
    with pytest.raises(ValueError, match="budget"):
        plain.generate(torch.tensor(TOKENS), budget=512, max_new_tokens=2)


def test_a_row_that_is_told_none_is_plain_beside_one_that_is_told(told):
    model, _, _, how, _ = told
    extra = {"budget_mask": torch.ones(3, 14)} if how.positions == "response" else {}
    mixed = of_torch(model, budget=[512, None, "low"], **extra)
    np.testing.assert_array_equal(mixed[1], of_torch(model)[1])
    np.testing.assert_array_equal(mixed[[0, 2]], of_torch(model, budget=512, **extra)[[0, 2]])
    with pytest.raises(ValueError, match="budget: found 2 budgets for a batch of 3"):
        model(torch.tensor(TOKENS), budget=[1, 2], **extra)


def test_the_budget_module_stays_float32_in_a_16_bit_model(told):
    out = told[-1]
    model = type(told[0]).from_pretrained(out, dtype=torch.bfloat16)
    assert model.budget.gate.dtype == torch.float32
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16
    inputs = torch.tensor(TOKENS)
    assert torch.isfinite(model(inputs, budget=512, budget_mask=torch.ones(3, 14)).logits).all()
