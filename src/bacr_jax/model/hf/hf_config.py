"""`config.json` of a Hugging Face folder: the shape it describes, and the one we write."""

import dataclasses
from pathlib import Path
from typing import Any

from bacr_jax import documents
from bacr_jax.config import ConditioningConfig
from bacr_jax.config import io as config_io
from bacr_jax.config.values import Misfit, convert, describe, shown
from bacr_jax.errors import UserError
from bacr_jax.model.sizes import Qwen2Config, RopeScaling


@dataclasses.dataclass(frozen=True)
class Family:
    """What tells the folders of a family from those of others.

    Attributes:
      name: what its classes in transformers begin with.
      qkv_bias, qk_norm: of its shapes (`Qwen2Config`); no two families have both alike.
      head_dim, max_positions, kv_heads: what transformers assumes where config.json has no such
        key; None: hidden_size / num_attention_heads, and num_attention_heads.
      off: what transformers can compute for it besides; none of it may be switched on.
      unset: keys that must be absent or null, because transformers computes otherwise with them.
    """

    name: str
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    max_positions: int = 32768
    kv_heads: int | None = None
    off: tuple[str, ...] = ()
    unset: tuple[str, ...] = ("attention_chunk_size", "per_layer_config", "text_config")

    @property
    def plain(self) -> str:
        """The architecture of its plain models."""
        return f"{self.name}ForCausalLM"

    @property
    def conditioned(self) -> str:
        """That of its models with a budget module.

        Their type is the plain ones', which transformers knows, so that it reads config and
        tokenizer without our code.
        """
        return f"Bacr{self.name}ForCausalLM"


# By model_type. All else that differs between models is a number of config.json.
FAMILIES = {
    "qwen2": Family("Qwen2", qkv_bias=True, kv_heads=32),
    "qwen3": Family("Qwen3", qk_norm=True, head_dim=128, kv_heads=32, off=("attention_bias",)),
    "llama": Family(
        "Llama",
        max_positions=2048,
        off=("attention_bias", "mlp_bias"),
        # Llama has no use_sliding_window: the key alone shortens the cache of transformers.
        unset=(*Family.unset, "sliding_window"),
    ),
}
# The type of conditioned folders of earlier versions.
_EARLIER = {"bacr_qwen2": "qwen2"}
MODELING = "modeling_bacr"
# Key of config.json: how a prompt becomes thinking and an answer (`data.exported`).
THINKING = "thinking"
# Key of the sentence that tells a policy its budget, and settings that say nothing of the module.
WORDS = "budget_words"
_NOT_OF_THE_MODULE = {"told", "words"}
# What folders of earlier versions say of where the embedding joins the stream: after the layer.
_SITE = "after_block"
# Key of config.json: names of budgets.
LEVELS = "budget_levels"

# Far beyond any model there is; a larger number is a slip, which would take hours to refuse later.
_MOST = {"num_hidden_layers": 10_000, "vocab_size": 1 << 26, "num_attention_heads": 1 << 16}
_LARGEST = 1 << 28

# What transformers assumes for all of them where config.json is silent.
_THETA_WHEN_ABSENT, _EPS_WHEN_ABSENT = 10000.0, 1e-6
# The one kind of layer here, as layer_types calls it.
_FULL = "full_attention"
# What the factors of llama3's rotary scaling are called, before "factor".
_LLAMA3 = ("", "low_freq_", "high_freq_")


@dataclasses.dataclass(frozen=True)
class BudgetModule:
    """How a saved budget module is to be used.

    Attributes:
      b_max: scale of the budget codes (`log` and `normalised` inputs), in tokens.
    """

    conditioning: ConditioningConfig
    b_max: int


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    try:
        return documents.read_object(path)
    except OSError as error:
        raise UserError(
            f"{path}: can't read it ({error.strerror}); write a Hugging Face folder"
        ) from None
    except ValueError as error:
        raise UserError(f"{path}: no JSON object ({error}); copy the file again") from None


def _positive_int(raw: dict[str, Any], key: str, where: Path, default: int | None = None) -> int:
    number = default if raw.get(key) is None else raw[key]
    most = _MOST.get(key, _LARGEST)
    if type(number) is not int or not 1 <= number <= most:
        raise UserError(f"{where}: {key} is {shown(number)}; write a whole number, 1 to {most}")
    return number


def _positive_float(
    raw: dict[str, Any], key: str, where: Path, default: float | None = None
) -> float:
    number = raw.get(key, default)
    if not isinstance(number, int | float) or isinstance(number, bool) or not number > 0:
        raise UserError(f"{where}: {key} is {shown(number)}; write a positive number")
    return float(number)


def _rope(raw: dict[str, Any], where: Path) -> tuple[float, RopeScaling | None]:
    """Returns the rotary base and scaling that transformers takes from a config.json.

    A rope_scaling that is not empty replaces rope_parameters. The base in neither of them is the
    one at the top level, where older files have it.
    """
    key = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    settings = raw.get(key) or {}
    if not isinstance(settings, dict):
        raise UserError(f"{where}: {key} is {shown(settings)}; write an object or null")
    for name, value in settings.items():
        # The names of layer types, some of them with null in place of an object.
        if isinstance(value, dict) or name.endswith("_attention"):
            raise UserError(
                f"{where}: {key} differs by layer type ({shown(name)}), which is not supported; "
                "write one set of rotary parameters for all layers"
            )
    _refuse_partial_rotation(raw | settings, where)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(
            f"{where}: {key} asks for {shown(kind)} rotary scaling, which is not supported; "
            "write a model with plain rotary embeddings, or with llama3's"
        )
    source = settings if "rope_theta" in settings else raw
    theta = _positive_float(source, "rope_theta", where, _THETA_WHEN_ABSENT)
    return theta, _llama3(raw, settings, where) if kind == "llama3" else None


def _refuse_partial_rotation(settings: dict[str, Any], where: Path) -> None:
    """Refuses heads of which only a part is rotated, on which engines do not agree."""
    share = settings.get("partial_rotary_factor")
    if share is not None and share != 1:
        raise UserError(
            f"{where}: partial_rotary_factor is {shown(share)}, which is not supported; only 1 is"
        )


def _llama3(raw: dict[str, Any], settings: dict[str, Any], where: Path) -> RopeScaling:
    """Returns llama3's scaling; its positions may be at the top level, which then wins."""
    factor, low, high = (_positive_float(settings, f"{name}factor", where) for name in _LLAMA3)
    if low >= high:
        raise UserError(
            f"{where}: low_freq_factor is {low:g} and high_freq_factor {high:g}; write a larger "
            "high_freq_factor"
        )
    positions_key = "original_max_position_embeddings"
    source = raw if positions_key in raw else settings
    if positions_key not in source:
        source = raw
        positions_key = "max_position_embeddings"
    return RopeScaling(factor, low, high, _positive_int(source, positions_key, where))


def _family(raw: dict[str, Any], where: Path) -> Family:
    """The family of a folder; UserError: it is none of those in the table."""
    kind = raw.get("model_type")
    family = FAMILIES.get(_EARLIER.get(kind, kind)) if isinstance(kind, str) else None
    architectures = raw.get("architectures") or [family.plain if family else None]
    if family is None or architectures not in ([family.plain], [family.conditioned]):
        known = ", ".join(f"{kind} ({family.plain})" for kind, family in FAMILIES.items())
        raise UserError(
            f"{where}: model_type {shown(kind)}, architectures {shown(architectures)}; write the "
            f"folder of a model of one of these types: {known}"
        )
    return family


def _refuse_other_models(raw: dict[str, Any], family: Family, where: Path) -> None:
    only: dict[str, Any] = {"hidden_act": "silu", "use_sliding_window": False, "is_causal": True}
    only |= dict.fromkeys(family.off, False)
    for key, value in only.items():
        if raw.get(key, value) != value:
            raise UserError(
                f"{where}: {key} is {shown(raw[key])}, which is not supported; only "
                f"{shown(value)} is"
            )
    for key in family.unset:
        if raw.get(key) not in (None, {}):
            raise UserError(
                f"{where}: {key} is {shown(raw[key])}, which is not supported; only null is"
            )
    if raw.get("quantization_config") is not None:
        raise UserError(f"{where}: the weights are quantised; write the bfloat16 model's folder")
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise UserError(f"{where}: layer_types is {shown(kinds)}; write a list of names or null")
    if others := [kind for kind in kinds if kind != _FULL]:
        raise UserError(
            f"{where}: layer_types has {shown(others[0], quote=False)}, which is not supported; "
            f"only {_FULL} is"
        )
    if kinds and len(kinds) != raw.get("num_hidden_layers"):
        raise UserError(
            f"{where}: layer_types has {len(kinds)} layers, but num_hidden_layers is "
            f"{shown(raw.get('num_hidden_layers'))}; copy the file again"
        )


def parse_config(raw: dict[str, Any], where: Path) -> Qwen2Config:
    """The shape in a parsed config.json; `where` is named in refusals."""
    family = _family(raw, where)
    _refuse_other_models(raw, family, where)
    width = _positive_int(raw, "hidden_size", where)
    heads = _positive_int(raw, "num_attention_heads", where)
    # A null is the number of heads in every family, a missing key is not.
    assumed_kv_heads = heads if "num_key_value_heads" in raw else family.kv_heads or heads
    kv_heads = _positive_int(raw, "num_key_value_heads", where, assumed_kv_heads)
    if heads % kv_heads:
        raise UserError(
            f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads "
            f"{kv_heads}; copy the file again"
        )
    if raw.get("head_dim", family.head_dim) is None and width % heads:
        raise UserError(
            f"{where}: hidden_size {width} is not a multiple of num_attention_heads {heads}; "
            "write head_dim"
        )
    head_dim = _positive_int(raw, "head_dim", where, family.head_dim or width // heads)
    if head_dim % 2:
        raise UserError(f"{where}: head_dim {head_dim} is odd; copy the file again")
    tied = raw.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise UserError(f"{where}: tie_word_embeddings is {shown(tied)}; write true or false")
    theta, scaling = _rope(raw, where)
    return Qwen2Config(
        vocab_size=_positive_int(raw, "vocab_size", where),
        hidden_size=width,
        intermediate_size=_positive_int(raw, "intermediate_size", where),
        num_layers=_positive_int(raw, "num_hidden_layers", where),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=theta,
        rms_norm_eps=_positive_float(raw, "rms_norm_eps", where, _EPS_WHEN_ABSENT),
        tie_embeddings=tied,
        max_positions=_positive_int(raw, "max_position_embeddings", where, family.max_positions),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        rope_scaling=scaling,
    )


def read_hf_config(folder: str | Path) -> Qwen2Config:
    """The shape of the model in a Hugging Face folder."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise UserError(f"{folder}: no such folder; write a Hugging Face folder")
    return parse_config(read_json(path), path)


def read_budget_module(folder: str | Path) -> BudgetModule | None:
    """How the budget module of a folder is to be used; None for a plain folder."""
    path = Path(folder) / "config.json"
    raw = read_json(path)
    conditioned = raw.get("architectures") == [_family(raw, path).conditioned]
    if not conditioned and raw.get("model_type") not in _EARLIER:
        return None
    return parse_module(raw, path)


def parse_module(raw: dict[str, Any], path: Path) -> BudgetModule:
    """The description of a budget module in a parsed file; `path` is named in refusals."""
    inside = raw.get("budget_module")
    if isinstance(inside, dict) and inside.get("site") == _SITE:
        inside = {name: value for name, value in inside.items() if name != "site"}
    fields = {f.name for f in dataclasses.fields(ConditioningConfig)} - _NOT_OF_THE_MODULE
    if not isinstance(inside, dict) or set(inside) != fields | {"b_max"}:
        raise UserError(f"{path}: budget_module is {shown(inside)}; export the folder again")
    found: dict[str, Any] = {}
    for name in fields:
        hint = config_io.schema()[f"conditioning.{name}"].hint
        try:
            found[name] = convert(hint, inside[name])
        except Misfit:
            raise UserError(
                f"{path}: budget_module.{name} is {shown(inside[name])}; write {describe(hint)}"
            ) from None
    return BudgetModule(ConditioningConfig(**found), _positive_int(inside, "b_max", path))


def read_budget_words(folder: str | Path) -> str | None:
    """The sentence that tells a folder's policy its budget; None: it is told none in words."""
    path = Path(folder) / "config.json"
    words = read_json(path).get(WORDS)
    if words is not None and (not isinstance(words, str) or words.count("{budget}") != 1):
        raise UserError(f"{path}: {WORDS} is {shown(words)}; write a sentence with {{budget}} once")
    return words


def read_levels(folder: str | Path) -> dict[str, int]:
    """Names of budgets that a folder knows, with their tokens; mostly none."""
    path = Path(folder) / "config.json"
    found = read_json(path).get(LEVELS) or {}
    whole = lambda tokens: type(tokens) is int and 0 <= tokens <= _LARGEST
    if not isinstance(found, dict) or not all(map(whole, found.values())):
        raise UserError(f"{path}: {LEVELS} is {shown(found)}; export the folder again")
    return found


def read_thinking(folder: str | Path) -> dict[str, Any] | None:
    """Section `thinking` of a folder's config.json, as it stands there; None: it has none."""
    path = Path(folder) / "config.json"
    found = read_json(path).get(THINKING)
    if found is not None and not isinstance(found, dict):
        raise UserError(f"{path}: {THINKING} is {shown(found)}; export the folder again")
    return found


def describe_module(module: BudgetModule) -> dict[str, Any]:
    """How a budget module is used, as files say it."""
    settings = dataclasses.asdict(module.conditioning)
    own = {name: value for name, value in settings.items() if name not in _NOT_OF_THE_MODULE}
    return {**own, "b_max": module.b_max}


def _describe_scaling(scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {}
    numbers = (scaling.factor, scaling.low, scaling.high)
    named = dict(zip((f"{name}factor" for name in _LLAMA3), numbers))
    positions = {"original_max_position_embeddings": scaling.positions}
    return {"rope_scaling": {"rope_type": "llama3", **named, **positions}}


def _fresh(config: Qwen2Config) -> dict[str, Any]:
    """A config.json for a model that never had one, in the form old and new readers know."""
    return {
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_positions,
        **_describe_scaling(config.rope_scaling),
        # The layout's, not the writer's: without it transformers warns of Mistral's tokenizers.
        "transformers_version": "4.57.0",
    }


def to_json(
    config: Qwen2Config,
    *,
    dtype: str,
    module: BudgetModule | None = None,
    source: dict[str, Any] | None = None,
    budget_words: str | None = None,
) -> dict[str, Any]:
    """The config.json of a folder.

    Args:
      source: the config.json the model came with; everything that is not about shape, type or
        conditioning (token ids, defaults of the hub) is kept from it.
      budget_words: sentence that tells the policy its budget after the question; None: none does.
    """
    kept = dict(source) if source is not None else _fresh(config)
    if source is not None and parse_config(source, Path("config.json")) != config:
        raise UserError("export: the source folder's config.json describes another shape")
    for key in ("auto_map", "budget_module", WORDS, LEVELS, THINKING, "dtype", "torch_dtype"):
        kept.pop(key, None)
    of = lambda one: (one.qkv_bias, one.qk_norm)
    kind, family = next(item for item in FAMILIES.items() if of(item[1]) == of(config))
    architecture = family.plain if module is None else family.conditioned
    ours: dict[str, Any] = {"model_type": kind, "architectures": [architecture]}
    if module is not None:
        ours["auto_map"] = {
            "AutoConfig": f"{MODELING}.Bacr{family.name}Config",
            "AutoModelForCausalLM": f"{MODELING}.{family.conditioned}",
        }
        ours["budget_module"] = describe_module(module)
    if budget_words is not None:
        # Engines that do not know the key keep it and do nothing with it.
        ours[WORDS] = budget_words
    # transformers 5 writes `dtype`, 4 reads `torch_dtype`; both read this one.
    return {**kept, **ours, "torch_dtype": dtype}
