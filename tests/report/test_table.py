"""Tables hold the numbers of the summaries in a good order, and escape every text."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from bacr_jax.report import table
from bacr_jax.report.table import NONE, Shown, Table


def entry(accuracy, low, high, tokens):
    return {"accuracy": accuracy, "ci95": [low, high], "mean_thinking_tokens": tokens}


BEFORE = {
    "greedy": {"1024": entry(0.5, 0.45, 0.55, 700.04), "512": entry(0.31, 0.2, 0.402, 480.0)},
    "sampled": {"512": entry(0.3, 0.29, 0.31, 470.0), "1024": entry(1.0, 0.99, 1.0, 1234.56)},
}
AFTER = {
    "greedy": {"512": entry(0.6, 0.5, 0.7, 400.0), "1024": entry(0.4, 0.36, 0.44, 500.0)},
    "sampled": {"512": entry(0.32, 0.305, 0.34, 410.0), "1024": entry(0.9, 0.88, 0.92, 520.0)},
}
GREEDY_ONLY = {"greedy": {"512": entry(0.6, 0.5, 0.7, 450.0), "2048": entry(0.7, 0.6, 0.8, 900.0)}}
POLICIES = {"before": BEFORE, "BACR": AFTER}


def printed(policies, width=80, **kwargs):
    console = Console(file=io.StringIO(), width=width, **kwargs)
    console.print(table.comparison_table("ledger", policies))
    return console.file.getvalue()


class TestRows:
    def test_are_sorted_by_budget_as_a_number(self):
        order = [(mode, budget) for mode, budget, _ in table.rows(POLICIES)]
        assert order == [
            ("greedy", "512"),
            ("greedy", "1024"),
            ("sampled", "512"),
            ("sampled", "1024"),
        ]

    def test_budgets_of_only_one_policy_appear_with_a_gap_for_the_others(self):
        found = table.rows({"before": BEFORE, "other": GREEDY_ONLY})
        gaps = {(mode, budget): [e is None for e in entries] for mode, budget, entries in found}
        assert gaps == {
            ("greedy", "512"): [False, False],
            ("greedy", "1024"): [False, True],
            ("greedy", "2048"): [True, False],
            ("sampled", "512"): [False, True],
            ("sampled", "1024"): [False, True],
        }


class TestTerminal:
    def test_a_cell_holds_accuracy_interval_and_tokens(self):
        text = printed(POLICIES)
        assert "31.0 [20.0, 40.2]  480.0 tok" in text
        assert "100.0 [99.0, 100.0]  1,234.6 tok" in text
        assert "before" in text and "BACR" in text and "1,024" in text

    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_up_to_three_policies_fit_80_columns_without_folding_an_interval(self, count):
        policies = {f"policy {i}": BEFORE for i in range(count)}
        lines = printed(policies).splitlines()
        assert max(map(len, lines)) <= 80
        assert sum(line.count("100.0 [99.0, 100.0]") for line in lines) == count

    def test_only_accuracies_apart_from_the_first_policys_are_coloured(self):
        text = printed(POLICIES, width=120, force_terminal=True, color_system="standard")
        green, red = "\x1b[1;32m", "\x1b[31m"
        assert text.count(green) == 1 and f"{green}60.0 [50.0, 70.0]" in text
        assert text.count(red) == 2 and f"{red}40.0 [36.0, 44.0]" in text
        # 32.0 [30.5, 34.0] overlaps 30.0 [29.0, 31.0].
        assert f"{green}32.0" not in text

    def test_a_missing_evaluation_is_a_dash(self):
        text = printed({"before": BEFORE, "other": GREEDY_ONLY})
        row = next(line for line in text.splitlines() if line.strip().startswith("2,048"))
        assert row.split()[1] == "-"

    def test_names_are_text_not_markup(self):
        assert "[red]" in printed({"[red]": BEFORE})


TABLE = Table("A & B", ["set", "n"], [["x|<b>", Text("1_0", style="red")]], caption="50 % & more")


def test_markdown_escapes_bars():
    lines = TABLE.markdown().splitlines()
    assert lines[0] == "### A & B"
    assert lines[2:5] == ["| set | n |", "| --- | ---: |", "| x\\|&lt;b> | 1_0 |"]


def test_markdown_keeps_every_text_in_its_line():
    text = Table("A\n# B <b>", ["n\n1"], [["x\r\n\ny"]], caption="p < .05,\n\n<i>|").markdown()
    assert text == "### A # B &lt;b>\n\n| n 1 |\n| --- |\n| x y |\n\np < .05, &lt;i>\\|\n"


def test_csv_has_the_numbers_and_every_text():
    interval = Shown("50.0 ± 10.0", (50.0, 40.0, 60.0), marks="†")
    without_ends = Shown("7.0", (7.0, None, None))
    rows = [
        ["numbers", interval, Shown("1 of 5", (1,)), interval],
        ["text", "55.8 to 0.0 at 48, seed 2", "never", without_ends],
        ["nothing", NONE, NONE, NONE],
        ["star", without_ends, Shown("2.0", (2.0,), marks="*"), ""],
    ]
    groups = [("", 1), ("task", 2), ("", 1)]
    text = Table("", ["row", "a", "b", "c"], rows, groups=groups).csv()
    assert text.splitlines() == [
        "row,task a,task a low,task a high,task a marks,task b,task b marks,c,c low,c high,c marks",
        "numbers,50,40,60,†,1,,50,40,60,†",
        'text,"55.8 to 0.0 at 48, seed 2",,,,never,,7,,,',
        "nothing,,,,,,,,,,",
        "star,7,,,,2,*,,,,",
    ]
    # A dash in a column of text is a text.
    assert Table("", ["a"], [[NONE], ["x"]]).csv() == "a\n-\nx\n"


def test_html_escapes_markup():
    found = TABLE.html()
    assert '<td class="words">x|&lt;b&gt;</td><td>1_0</td>' in found
    assert "<h3>A &amp; B</h3>" in found and "50 % &amp; more" in found


def test_latex_escapes_its_own_characters():
    lines = TABLE.latex().splitlines()
    assert lines[3] == r"\begin{tabular}{lr}"
    assert r"x|$<$b$>$ & 1\_0 \\" in lines


def test_rows_of_another_length_are_refused():
    with pytest.raises(ValueError, match="different numbers of entries"):
        Table("", ["a"], [["1", "2"]])


def test_a_comparison_in_html_has_a_column_for_the_decoding():
    found = table.comparison("ledger", POLICIES).html()
    cells = "<td>31.0 [20.0, 40.2], 480.0 tok</td><td>60.0 [50.0, 70.0], 400.0 tok</td>"
    assert f'<tr><td class="words">greedy</td><td>512</td>{cells}</tr>' in found


class TestNarrowTerminal:
    def test_columns_are_left_out_by_rank_and_named(self):
        wide = Table(
            "t",
            ["mode", "budget", "accuracy", "extra", "more"],
            [["greedy", "8", "10.9 [3.1, 18.8]", "1" * 20, "2" * 20]],
            caption="all",
            drop=("more", "extra"),
        )
        at_100, at_70 = (rendered(wide.terminal(), width) for width in (100, 70))
        assert "more" in at_100 and "narrow" not in at_100
        assert "2" * 20 not in at_70 and "1" * 20 in at_70
        assert "too narrow for the columns more" in " ".join(at_70.split())
        # The files have all columns.
        assert "more" in wide.markdown()

    def test_no_interval_is_broken_at_any_width_that_holds_one(self):
        policies = {f"policy {i}": BEFORE for i in range(6)}
        for width in range(30, 130, 10):
            text = printed(policies, width=width)
            assert max(map(len, text.splitlines())) <= width
            # Two decodings at two budgets of every policy.
            assert text.count("[99.0, 100.0]") == 6 and text.count("[20.0, 40.2]") == 6

    def test_columns_that_do_not_fit_go_into_another_table_with_the_same_labels(self):
        text = printed({f"policy {i}": BEFORE for i in range(6)})
        assert text.count("budget") == 2 and text.count("1,024") == 4
        assert " ".join(text.split()).count("accuracy in percent") == 1


def rendered(renderable, width):
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()
