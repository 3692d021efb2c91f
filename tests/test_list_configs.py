"""`bacr configs` lists every config of the package on one line of 80 columns."""

from bacr_jax.__main__ import main
from bacr_jax.config import shipped
from bacr_jax.list_configs import lines


def test_every_config_has_one_line_that_fits(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["configs"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= 80
    listed = [line.split()[0] for line in printed if line.startswith("  ")]
    names = [*shipped.names(("", "methods", "examples")), *shipped.names(shipped.STUDIES)]
    assert sorted(listed) == sorted(name.rpartition("/")[2] for name in names)
    # Each listed name is one that --config accepts.
    for name in listed:
        assert shipped.locate(name, (*shipped.CONFIGS, *shipped.STUDIES)).is_file()


def test_every_config_is_described_and_only_long_descriptions_are_cut():
    described = [line.split(maxsplit=1) for line in lines(80) if line.startswith("  ")]
    assert all(len(words) == 2 for words in described)
    cut = [name for name, text in described if text.rstrip().endswith("...")]
    assert cut == ["sensitivity"]
    assert not any(line.endswith("...") for line in lines(120))
