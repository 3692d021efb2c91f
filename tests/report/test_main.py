"""bacr report: where the report is, and one line for bad input."""

from bacr_jax.report import __main__ as command
from report_world import make_whole_run


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


def test_several_runs_make_one_page(tmp_path, capsys):
    folders = [str(make_whole_run(tmp_path / name)) for name in "ab"]
    arguments = ["--run", folders[0], "--run", folders[1]]
    assert command.main([*arguments, "--label", "first", "--label", "second"]) == 0
    written = tmp_path / "a" / "comparison.html"
    assert capsys.readouterr().out.strip() == str(written)
    assert ">first</th>" in written.read_text() and ">second</th>" in written.read_text()
    assert not (tmp_path / "b" / "report.html").exists()
    for refused in ([*arguments, "--label", "one"], [*arguments[:2], "--label", "one"]):
        assert command.main(refused) == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1 and "--label" in captured.err
