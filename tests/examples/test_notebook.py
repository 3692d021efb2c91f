"""The notebook runs from its first cell to its last, and was committed as it was run."""

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


@pytest.fixture(scope="module")
def notebook():
    nbformat = pytest.importorskip("nbformat", reason="the extra test is not installed")
    return nbformat.read(NOTEBOOK, as_version=4)


def test_it_was_committed_with_the_outputs_of_one_run_without_errors(notebook):
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    (notice,) = [output.text for output in outputs if output.get("name") == "stderr"]
    assert notice.startswith("runs/quickstart: step 100, the best: mean accuracy ")
    text = "".join(output.get("text", "") for output in outputs)
    assert "unlike its publication" not in text and "compiled programs are kept" not in text
    pictures = [o for o in outputs if "image/png" in o.get("data", {})]
    assert len(pictures) == 3
    assert NOTEBOOK.stat().st_size < 300_000


@pytest.mark.slow  # three trainings; part of .ci/run
def test_it_runs(notebook, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="the extra test is not installed")
    monkeypatch.setenv("BACR_NOTEBOOK", "small")
    where = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=240, resources=where)
    client.execute()
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {
        "quickstart",
        "brief",
        "median",
    }
