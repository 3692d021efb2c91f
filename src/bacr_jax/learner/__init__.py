"""Contains the learner: objective, optimizer and policy updates.

`score_tokens` computes the log-probabilities of all sampled tokens of a `Batch` and can be
differentiated, so that a loss of your own can be built from it. `learner.train_step` contains the
update with the paper's loss.
"""

from bacr_jax.learner.batch import Batch as Batch
from bacr_jax.learner.batch import make_batch as make_batch
from bacr_jax.learner.spec import LearnerSpec as LearnerSpec
from bacr_jax.learner.spec import phi_of as phi_of
from bacr_jax.learner.token_scores import TokenScores as TokenScores
from bacr_jax.learner.token_scores import score_tokens as score_tokens
