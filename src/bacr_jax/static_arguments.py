"""Marks the arguments of functions that must be static under `jax.jit`.

The functions of `curriculum`, `rewards`, `advantages` and `losses` can be jitted. Arguments that
select a formula or determine a shape can't be traced, so they have to be static:

    jax.jit(rewards.cut_points, static_argnames="num_cuts")(budgets, num_cuts=4)
"""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Function = Callable[_Parameters, _Result]


def static_arguments(*names: str) -> Callable[[_Function], _Function]:
    """Returns a decorator that raises a clear error if a named argument is a traced value.

    The decorated function stores the names in its attribute `static_argnames`.
    """

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        parameters = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def checked(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            arguments = dict(zip(parameters, args)) | kwargs
            for name in names:
                leaves = jax.tree.leaves(arguments.get(name))
                if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
                    raise TypeError(
                        f"{function.__name__}: the argument `{name}` is traced by jax.jit, but "
                        f"must be a Python value; use jax.jit({function.__name__}, "
                        f"static_argnames={names})"
                    )
            return function(*args, **kwargs)

        checked.static_argnames = names  # type: ignore[attr-defined]
        return checked

    return decorate
