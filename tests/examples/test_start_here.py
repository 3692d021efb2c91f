"""The first page to read: it runs wherever it is copied, learns in ten steps, and is right."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from bacr_jax.learner.objective import Minibatch, loss_normalizers
from bacr_jax.learner.train_step import gradients, init_state

FILE = Path(__file__).parents[2] / "examples" / "start_here.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("start_here", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_one_page_of_public_names_and_five_imports_of_the_package():
    source = FILE.read_text()
    modules = [node.module for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
    assert len([name for name in modules if name.startswith("bacr_")]) <= 5
    assert len(source.splitlines()) <= 200
    assert "._" not in source and "yaml" not in source.lower()


@pytest.mark.optimized
def test_copied_into_an_empty_folder_it_runs_and_learns_in_ten_steps(tmp_path):
    (tmp_path / "start_here.py").write_bytes(FILE.read_bytes())
    command = [sys.executable, "start_here.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    accuracy = [int(line.split()[2].rstrip("%")) for line in done.stdout.splitlines()]
    assert len(accuracy) == 10
    assert accuracy[0] < 30 and accuracy[-1] > 50


def test_its_loss_has_the_gradient_of_the_library(example, monkeypatch):
    """Compares the page's own loss with `learner.train_step` on the batch of one step."""
    batches = []

    def take(params, optimizer_state, batch):
        batches.append(batch)
        return params, optimizer_state

    monkeypatch.setattr(example, "update", take)
    params = example.qwen2.init(jax.random.key(1), example.MODEL, conditioning=example.CONDITIONING)
    letters = np.arange(example.Q) % 4 + example.FIRST_LETTER
    example.step(params, None, letters, jax.random.key(2))
    # The page passes the batch to a jitted function, which takes NumPy arrays too.
    batch = jax.tree.map(jax.numpy.asarray, batches[0])
    assert float(np.abs(batch.thinking_advantages).max()) > 0.1
    state = init_state(params, None, example.OPTIMIZER, example.OPTIMIZER)
    spec = example.LEARNER
    # The page has no entropy bonus.
    loss = example.LossConfig(entropy_coef=0.0)
    spec = example.learner.LearnerSpec(spec.model, spec.conditioning, loss, None, spec.b_max)
    normalizers = loss_normalizers(batch, spec=spec)
    expected, _ = gradients(
        state, Minibatch(batch), normalizers, example.RULES.allowed_tokens, spec=spec
    )
    own = jax.grad(example.policy_loss)(params, batch)
    for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(expected.policy)):
        np.testing.assert_allclose(a, b, atol=1e-6)
