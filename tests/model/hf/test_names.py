"""The table of tensor names: every leaf of the parameters, once, in its shape."""

import dataclasses

import jax
import pytest

from bacr_jax.config import ConditioningConfig
from bacr_jax.model import qwen2
from bacr_jax.model.hf import names
from hf_world import FAMILIES, TINY


def leaves(config, conditioning=None):
    params = jax.eval_shape(
        lambda: qwen2.init(jax.random.key(0), config, conditioning=conditioning)
    )
    flat = jax.tree_util.tree_flatten_with_path(params)[0]
    return {tuple(part.key for part in path): leaf.shape for path, leaf in flat}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_every_layer_of_every_leaf_has_one_name(tied, family):
    config = dataclasses.replace(FAMILIES[family], tie_embeddings=tied)
    entries, want = names.backbone(config), leaves(config)
    assert {entry.path for entry in entries} == set(want)
    assert len({entry.name for entry in entries}) == len(entries)
    assert len({(entry.path, entry.layer) for entry in entries}) == len(entries)
    assert len(entries) == sum(config.num_layers if path[0] == "layers" else 1 for path in want)
    for entry in entries:
        assert entry.leaf_shape(config.num_layers) == want[entry.path]
    assert any(entry.name == "lm_head.weight" for entry in entries) is not tied


@pytest.mark.parametrize("sharing", ["shared", "per_layer"])
def test_the_budget_module_is_stored_as_it_stands(sharing):
    conditioning = ConditioningConfig(sharing=sharing)
    want, entries = leaves(TINY, conditioning), names.budget_module(TINY, conditioning)
    assert {entry.path: entry.shape for entry in entries} == {
        path: shape for path, shape in want.items() if path[0] == "budget"
    }
