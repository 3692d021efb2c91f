"""What training will need is compiled while the warm-up trains, which leaves cores idle.

A thread of its own goes through one iteration of Algorithm 1 and one evaluation with untrained
weights and throws the results away. Everything random is derived from keys, and nothing that the
run keeps is touched, so that all its numbers are those of a run that compiled later.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator

import jax

from bacr_jax.evaluation.by_budget import evaluate_by_budget
from bacr_jax.learner import initial
from bacr_jax.model import adapters
from bacr_jax.parallel import processes
from bacr_jax.training.algorithm import iterate
from bacr_jax.training.run import Run, init_state


class _Left(Exception):
    """Nobody needs the rest."""


@contextlib.contextmanager
def compiled_ahead(work: Callable[[Callable[[], None]], None]) -> Iterator[Callable[[], None]]:
    """Does `work` in a thread beside what is inside, and waits for it at the end.

    What is yielded begins it, at its first call: what is inside has its own programs to compile
    first, and would wait for those.

    A failure of `work` is none of the run's: what it could not do is done when it is needed, and
    fails there with its own words.

    Args:
      work: is given a function to call wherever it can be left, which raises to leave it: what is
        inside has failed, or was asked to stop.
    """
    leaving = threading.Event()

    def poll() -> None:
        if leaving.is_set():
            raise _Left

    def quietly() -> None:
        with contextlib.suppress(Exception):
            work(poll)

    thread = threading.Thread(target=quietly, name="compiling ahead")

    def begin() -> None:
        if thread.ident is None:
            thread.start()

    try:
        yield begin
    except BaseException:
        leaving.set()
        raise
    finally:
        if thread.ident is not None:
            # A process that ends while XLA compiles would crash.
            thread.join()


def can_go_ahead(run: Run) -> bool:
    """Whether the first iteration is known, is one process's alone, and finds idle cores.

    With dynamic sampling untrained weights would be asked again and again. A GPU is not idle while
    the warm-up trains, and its memory is not there twice.
    """
    alone = not processes.several() and jax.default_backend() == "cpu"
    return run.total_steps > 0 and alone and run.method.dynamic_sampling is None


def go_ahead(run: Run, poll: Callable[[], None]) -> None:
    """An iteration and an evaluation with untrained weights, for the sake of their programs.

    Args:
      run: what stays fixed; its graders are not asked.
      poll: raises to leave.
    """
    key, config = jax.random.key(0), run.config
    params = initial.initial_params(key, run.policy, None)
    environment = run.environment.exactly_graded()
    run = dataclasses.replace(run, environment=environment, frozen=adapters.split(params)[0])
    largest = max(config.eval.budgets)
    evaluate_by_budget(
        run.policy.decode_params(params),
        environment,
        next(iter(environment.eval.values())),
        key,
        config=dataclasses.replace(config.eval, budgets=(largest,), samples=0, dense=None),
        spec=run.policy.evaluation,
        seed=config.seed,
        phi_of=run.policy.phi_of(params),
        poll=poll,
    )
    poll()
    state = init_state(run, params, initial.random_head(key, run.policy))
    # Another copy: an update takes the weights it is given.
    reference = initial.initial_params(key, run.policy, None) if config.loss.kl_coef > 0 else None
    iterate(run, state, 0, reference=reference, poll=poll)
