"""Samples thinking up to a token budget, and answers at truncation points of the thinking.

A trunk is a prompt with its sampled thinking. A cut is a truncation point of the thinking. A branch
is an answer that continues the thinking from a cut.
"""

from bacr_jax.prompts.decode_rules import DecodeRules as DecodeRules
from bacr_jax.prompts.decode_rules import decode_rules as decode_rules
from bacr_jax.prompts.decode_rules import stop_token as stop_token
from bacr_jax.rollout.rollouts import Rollout as Rollout
from bacr_jax.rollout.rollouts import generate as generate
from bacr_jax.rollout.rollouts import precompile as precompile
from bacr_jax.rollout.rows import Callbacks as Callbacks
from bacr_jax.rollout.rows import RolloutRequest as RolloutRequest
from bacr_jax.rollout.rows import SamplingSetup as SamplingSetup
from bacr_jax.rollout.sampling import SamplingParams as SamplingParams
from bacr_jax.rollout.sampling import sampling_params as sampling_params
from bacr_jax.rollout.spec import DecodeSpec as DecodeSpec
from bacr_jax.rollout.spec import RolloutSpec as RolloutSpec
from bacr_jax.types import Prompts as Prompts
