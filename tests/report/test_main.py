"""python -m bacr_jax.report: where the report is, and one line for bad input."""

from bacr_jax.report import __main__ as command


def test_the_command_prints_where_the_report_is(run, capsys):
    assert command.main(["--run", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_bad_input_is_one_line(run, tmp_path, capsys):
    for arguments in (["--run", str(tmp_path / "none")], [], ["--run", str(run), "--out", "/"]):
        assert command.main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1 and captured.out == ""
    (run / "summary.json").write_text("{")
    assert command.main(["--run", str(run)]) == 2
    assert "damaged" in capsys.readouterr().err
