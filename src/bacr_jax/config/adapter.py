"""Which weights a run trains, and in what type the others are kept."""

from collections.abc import Iterator

from bacr_jax.config.schema import Config


def param_dtype(config: Config) -> str:
    """Type that the model's weights are kept in; what is trained beside a frozen base is fp32."""
    own = config.model.param_dtype
    if own is not None:
        return own
    return "float32" if config.adapter.rank is None else config.model.compute_dtype


def adapter_problems(config: Config) -> Iterator[str]:
    """What is wrong with adapter.* and model.param_dtype."""
    adapter, model = config.adapter, config.model
    if adapter.rank is None:
        if adapter.path is not None:
            yield "adapter.path: found a folder, but adapter.rank=null; write its adapters' rank"
        if model.param_dtype == "bfloat16":
            yield (
                "model.param_dtype=bfloat16: trained weights would lose most of their updates to "
                "rounding; write float32, or adapter.rank=32 to train adapters on a frozen base"
            )
        return
    if not adapter.targets or len(set(adapter.targets)) < len(adapter.targets):
        yield "adapter.targets: write each matrix once, such as [q, v]"
    if adapter.decode == "beside" and param_dtype(config) != model.compute_dtype:
        yield (
            f"adapter.decode=beside: reads the base as it is kept, in {param_dtype(config)}, but "
            f"model.compute_dtype={model.compute_dtype}; write model.param_dtype="
            f"{model.compute_dtype}"
        )
