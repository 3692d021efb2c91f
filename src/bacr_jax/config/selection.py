"""Which set a run's best checkpoint is chosen on."""

from collections.abc import Iterator

from bacr_jax.config.schema import Config

# Held-out training questions, as a set beside those of data.eval.
HOLDOUT = "train_holdout"


def _named(config: Config) -> list[str]:
    """Sets of data.eval that eval.select names: by the whole entry, or what is before its colon."""
    name = config.eval.select
    whole = [spec for spec in config.data.eval if spec == name]
    return whole or [spec for spec in config.data.eval if spec.partition(":")[0] == name]


def selection_set(config: Config) -> str | None:
    """The set that best.json is chosen on, as evaluations call it.

    None where held-out questions would choose but only the last checkpoint is evaluated: there is
    nothing to choose from.
    """
    if config.eval.select == HOLDOUT:
        return None if config.eval.every is None else HOLDOUT
    return _named(config)[0]


def problems(config: Config) -> Iterator[str]:
    """What is wrong with eval.select and eval.holdout."""
    select, named = config.eval.select, _named(config)
    if select == HOLDOUT:
        if config.eval.every is not None and not config.eval.holdout:
            yield (
                f"eval.holdout=0: leaves eval.select={HOLDOUT} no question to select on; write 1 "
                "or more, or a set of data.eval in eval.select"
            )
    elif len(named) != 1:
        found = "none" if not named else "several"
        yield (
            f"eval.select: found {select!r}, which names {found} of data.eval; write {HOLDOUT}"
            + "".join(f" or {spec}" for spec in config.data.eval)
        )
