"""`bacr keys` lists all keys, those of a section, or one."""

from bacr_jax.__main__ import main
from bacr_jax.config import io as config_io


def printed(capsys, *words):
    assert main(["keys", *words]) == 0
    return capsys.readouterr().out


def test_all_keys_are_listed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert printed(capsys) == config_io.help_text(100) + "\n"


def test_a_section_has_only_its_keys_and_a_key_only_itself(capsys):
    assert "data.ledger.variant" in printed(capsys, "data")
    of_budget = printed(capsys, "budget")
    assert "budget: thinking budgets" in of_budget and "cuts." not in of_budget
    (line,) = [line for line in printed(capsys, "seed").splitlines() if line.startswith("  seed")]
    assert "seed of the random number" in line


def test_an_unknown_name_gets_the_nearest_one(capsys):
    assert main(["keys", "budgt"]) == 2
    error = capsys.readouterr().err
    assert error == "error: command line: budgt: there is no such section or key; use budget\n"
    assert main(["keys", "lr"]) == 2
    assert "use optimizer.learning_rate" in capsys.readouterr().err
