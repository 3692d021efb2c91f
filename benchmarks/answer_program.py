"""Lowers the program that samples answers, with abstract arguments.

`bacr plan` estimates the cost of answers by formulas and does not need this program. `compiled.py`
and a test analyse the program itself.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Lowered

from bacr_jax import parallel
from bacr_jax.rollout import branches as branching
from bacr_jax.rollout import trunks
from bacr_plan.programs import Programs, laid_out, over


def answers_of(programs: Programs) -> Lowered:
    """Lowers one chunk of answer decoding, for an answer at every cut of every slot.

    The answers read the trunks' KV caches without copying them.
    """
    spec, state = programs.rollout, programs.slots()
    number: Any = jax.ShapeDtypeStruct((), jnp.int32)
    number = laid_out(number, parallel.replicated(programs.decode_mesh))
    return branching.decode_branches.lower(
        programs.decode_copy(),
        state.cache,
        branches_of(programs, state),
        number,
        programs.draws(),
        number,
        spec=spec.decode,
        num_steps=spec.chunk,
    )


def branches_of(programs: Programs, state: Any) -> Any:
    """Returns the abstract state of the answers at every cut of the slots with this state."""
    spec, mesh = programs.rollout, programs.decode_mesh
    branches = programs.method.num_cuts * programs.method.answers
    cuts = jax.ShapeDtypeStruct((spec.slots, branches), jnp.int32)
    opened = functools.partial(
        branching.open_branches, spec=spec.decode, answer_tokens=spec.answer_tokens
    )
    branches = jax.eval_shape(
        lambda state, cuts, rules: opened(trunks.trunks_of(state), cuts, state.ids, rules),
        state,
        cuts,
        programs.draws().rules,
    )
    by_row, tensor = parallel.AXES[:2], parallel.AXES[2]
    return dataclasses.replace(
        laid_out(dataclasses.replace(branches, cache=()), over(mesh, by_row)),
        cache=laid_out(branches.cache, over(mesh, by_row, tensor)),
        phi=state.phi,
    )
