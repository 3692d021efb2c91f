"""Combinations of curriculum, data and warm-up that make no sense."""

from collections.abc import Iterator

from bacr_jax.config.schema import Config
from bacr_jax.config.values import written


def method_settings(config: Config) -> Iterator[str]:
    """Settings that contradict each other, whatever the method."""
    schedule = config.curriculum
    if schedule.difficulty == "continuous" and schedule.pass_rate != "ema":
        yield (
            f"curriculum.pass_rate={schedule.pass_rate}: difficulty=continuous keeps its own "
            "record of every problem; write curriculum.pass_rate=ema"
        )
    if schedule.difficulty == "continuous" and config.data.order == "shuffled":
        yield (
            "data.order=shuffled: shuffles within groups, but curriculum.difficulty=continuous "
            "draws every problem by itself; write data.order=drawn"
        )
    if (schedule.probe_budget or 0) > config.budget.max:
        yield (
            f"curriculum.probe_budget={schedule.probe_budget}: is above budget.max="
            f"{config.budget.max}; write at most {config.budget.max}"
        )
    if config.warmup.style is not None and config.data.ledger.variant != "tradeoff":
        yield (
            f"warmup.style={config.warmup.style}: data.ledger.variant="
            f"{config.data.ledger.variant} teaches too many styles to stop by one; write "
            "data.ledger.variant=tradeoff, or warmup.style=null"
        )
    band = config.warmup.style_accuracy
    if len(band) != 2 or band[0] >= band[1]:
        yield f"warmup.style_accuracy: found {written(band)}; write [low, high]"
