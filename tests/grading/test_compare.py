"""What is decided without a computer algebra system, and what is left to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bacr_grading.compare import bases_clash, decide
from bacr_grading.parsed_answer import read


def strict(pred, reference):
    return decide(read(pred), read(reference), lenient=False)[0]


@pytest.mark.parametrize(
    ("pred", "reference"),
    [
        ("\\left( \\frac12, 3 \\right)", "(\\frac{1}{2},3)"),
        ("2,1", "1, 2"),
        ("\\{1,2\\}", "\\{2,1\\}"),
        ("75,75", "75"),
        ("A and B", "\\text{B, A}"),
        ("6, 8\\text{, and }10", "6,8,10"),
        ("(C)", "\\text{C}"),
        ("evelyn", "\\text{Evelyn}"),
        ("June 20", "\\text{June 20}"),
        ("x = 5", "5"),
        ("5", "k = 5"),
        ("x = 1/2", "x = 0.5"),
        ("204_{5}", "204_5"),
        ("204", "204_5"),
        ("(1010)_2", "1010_{2}"),
        ("1010", "(1010)_2"),
        ("\\text{2A}_{16}", "2a_{16}"),
        ("(101)_2, (11)_2", "11_2, 101_2"),
        ("\\pm 2", "-2, 2"),
        ("1\\pm\\sqrt5", "1-\\sqrt{5}, 1+\\sqrt{5}"),
        ("1000,99", "1000.99"),
        ("1\\,000{,}99", "1000.99"),
        (
            "\\begin{bmatrix} 1 & 2 \\\\ 3 & 0.5 \\end{bmatrix}",
            "\\begin{pmatrix}1&2\\\\3&\\frac{1}{2}\\end{pmatrix}",
        ),
        ("$ \\dfrac{x}{2} $", "\\frac{x}{2}"),
        ("x^{2}+1", "x^2 + 1"),
        ("2\\cdot 3", "2 \\times 3"),
        ("(-\\infty, 2]", "\\left(-\\infty,2\\right]"),
        ("185\\", "185"),
        ("1{:}2", "1:2"),
        ("5 hundred thousand", "500000"),
        ("5 millions", "5 million dollars"),
        ("5\\text{ hundred thousands}", "500,000"),
        ("5 cm^3", "5"),
        ("100 cm^2", "100 square centimeters"),
        ("5 ft^{2}", "5\\text{ ft}^2"),
        ("5 m/s", "5\\text{ m/s}"),
        ("12\\sqrt{13} feet", "12\\sqrt{13}\\text{ feet}"),
    ],
)
def test_the_same_at_once(pred, reference):
    assert strict(pred, reference) is True


@pytest.mark.parametrize(
    ("pred", "reference"),
    [
        ("(2,1)", "(1,2)"),
        ("1,2", "1,2,3"),
        ("1", "1,2"),
        ("41 \\text{ or } 42", "42"),
        ("204_7", "204_5"),
        ("54", "204_5"),
        ("(1011)_2", "1010_2"),
        ("(1010)_3", "1010_2"),
        ("\\text{2B}_{16}", "2A_{16}"),
        ("2", "\\pm 2"),
        ("\\pm 2", "2"),
        ("\\text{odd}", "\\text{even}"),
        ("bca", "\\text{abc}"),
        ("\\text{four}", "5"),
        ("1,2", "32,349"),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\3\\end{pmatrix}"),
        ("[0,1)", "[0,9)"),
        ("500", "5 hundred thousand"),
        ("2000000", "2 million billion"),
        ("5 cm^2", "5\\text{ cm}^3"),
        ("2\\sqrt{3}\\text{ cm}", "2\\sqrt{3}\\text{ m}"),
        ("2\\sqrt{3} cm", "x = 2\\sqrt{3} m"),
        ("10\\pi\\text{ cm}^2", "10\\pi\\text{ cm}^3"),
        ("10\\pi\\text{ square inches}", "10\\pi\\text{ feet}"),
        ("\\frac{\\pi}{2}\\text{ rad}", "\\frac{\\pi}{2}^\\circ"),
        ("2^3\\text{ cm}", "8\\text{ m}"),
        ("(\\sqrt{3}\\text{ cm}, 2)", "(\\sqrt{3}\\text{ m}, 2)"),
        ("CBA", "ABC"),
        ("DACB", "(ABCD)"),
    ],
)
def test_different_at_once(pred, reference):
    assert strict(pred, reference) is False


@pytest.mark.parametrize(
    ("pred", "reference"),
    [
        ("\\sqrt{12}", "2\\sqrt{3}"),
        ("x+1", "1+x"),
        ("(0,1)", "0<x<1"),
        ("[1,2]", "(1,2)"),
        ("x = 5", "y = 5"),
        ("ab", "ba"),
        ("CD", "DC"),
        ("xyz", "zyx"),
        ("2\\sqrt{3}\\text{ feet}", "2\\sqrt{3}"),
        ("2\\sqrt{3}\\text{ feet}", "\\sqrt{12}\\text{ ft}"),
        ("2\\sqrt{3}\\text{ cm}, x\\text{ m}", "x\\text{ m}, \\sqrt{12}\\text{ cm}"),
        ("12\\cos 40^\\circ", "12\\cos 40^\\circ\\text{ feet}"),
        ("5\\text{ }6", "56"),
        ("5 m^2", "5"),
        ("2 g + 3 h", "3 h + 2 g"),
        ("1,000,7", "1000,7"),
        ("\\begin{vmatrix}1&2\\\\3&4\\end{vmatrix}", "-2"),
    ],
)
def test_left_to_the_computer_algebra_system(pred, reference):
    assert strict(pred, reference) is None


@pytest.mark.parametrize("pm", ["\\text{ p.m.}", " p.m.", " PM", "pm"])
@pytest.mark.parametrize("time", ["2:30", "4\\!:\\!51\\!:\\!06 ", "5"])
def test_the_evening_is_not_the_morning_in_reports_either(time, pm):
    pred, reference = read(time + pm), read(time + "\\text{ a.m.}")
    assert decide(pred, reference, lenient=True)[0] is False
    assert decide(pred, read(time + "\\text{ P.M.}"), lenient=True)[0] is not False


@pytest.mark.parametrize(
    ("pred", "reference", "same"),
    [
        ("10:30 AM", "10:30\\text{ a.m.}", True),
        ("10:30", "10:30\\text{ p.m.}", True),
        ("10:30 p.m.", "10:30", True),
        ("5 pm", "5:00\\text{ p.m.}", True),
        ("17:00", "5:00\\text{ p.m.}", True),
        ("0:30", "12:30\\text{ a.m.}", True),
        ("5:00", "05\\!:\\!00", True),
        ("8:34 pm, 20:34", "20\\!:\\!34, 8\\!:\\!34 \\text{ p.m.}", True),
        ("1:15", "2:30", False),
        ("3:10", "6:20", False),
        ("1:15 p.m.", "2:30\\text{ p.m.}", False),
        ("5:00", "17:00", False),
        ("15:00", "3:00\\text{ a.m.}", False),
        ("4:51", "4:51:06", False),
        ("6:4", "3:2", None),
        ("\\frac{3}{10}", "3:10", None),
        ("\\frac{1}{3}", "10:30\\text{ a.m.}", False),
        ("t=10:30\\text{ a.m.}", "10:30 a.m.", True),
        ("5 p.m.", "t=5\\text{ p.m.}", True),
        ("2:4:6", "1:2:3", True),
    ],
)
@pytest.mark.parametrize("lenient", [False, True])
def test_times_of_day_are_not_ratios(pred, reference, same, lenient):
    assert decide(read(pred), read(reference), lenient=lenient)[0] is same


@pytest.mark.parametrize(
    ("pred", "reference", "same"),
    [
        ("x=1, y=2", "(1,2)", True),
        ("y=2, x=1", "(1,2)", True),
        ("(x=1, y=2)", "(1,2)", True),
        ("y=2\\text{ and }x=1", "(x,y)=(1,2)", True),
        ("k=3, n=10", "(n,k)=(10,3)", True),
        ("(y,x)=(2,1)", "(x,y)=(1,2)", True),
        ("(1,2)", "x=1, y=2", True),
        ("4, 5", "AB=4, CD=5", True),
        ("3, 2", "x_1=2, x_2=3", True),
        ("y=4, x=3", "3, 4", True),
        ("y=1, x=2", "(1,2)", False),
        ("(y=1, x=2)", "(1,2)", False),
        ("y=1, x=2", "(x,y)=(1,2)", False),
        ("(y,x)=(1,2)", "(x,y)=(1,2)", False),
        ("(a,b)=(1,2)", "(x,y)=(1,2)", False),
        ("(2,1)", "x=1, y=2", False),
        ("5, 4", "AB=4, CD=5", False),
        ("x=1 or y=2", "(1,2)", False),
        ("x=1, x=2", "(1,2)", False),
        ("x=1, y=2", "(1,2,3)", False),
    ],
)
@pytest.mark.parametrize("lenient", [False, True])
def test_named_values_are_compared_by_name(pred, reference, same, lenient):
    assert decide(read(pred), read(reference), lenient=lenient)[0] is same


@pytest.mark.parametrize("written", ["3, 5", "3 and 5", "3\\text{ or }5", "3,\\ 5"])
def test_a_list_of_two_numbers_is_no_decimal_in_reports_either(written):
    for pred, reference in ((written, "3.5"), ("3.5", written)):
        assert decide(read(pred), read(reference), lenient=True)[0] is False
    assert decide(read("3.5"), read("3,5"), lenient=True)[0] is True


def test_other_units_do_not_matter_in_reports():
    assert decide(read("2\\sqrt{3} cm"), read("2\\sqrt{3}\\text{ m}"), lenient=True)[0] is None


def test_a_missing_base_in_the_reference_is_forgiven_in_reports_only():
    pred, reference = read("1010_2"), read("1010")
    assert decide(pred, reference, lenient=False)[0] is False
    assert decide(pred, reference, lenient=True)[0] is True


def test_bases_inside_expressions_clash():
    assert bases_clash("12_3+1", "12_4+1")
    assert not bases_clash("12_3+1", "1+12_3")
    assert not bases_clash("x_1", "x_2")


def test_every_decision_says_what_made_it():
    assert decide(read("1"), read("2"), lenient=False)[1] == "number"
    assert decide(read("a"), read("\\text{b}"), lenient=False)[1] == "string"
    assert decide(read("1,2"), read("2,3"), lenient=False)[1] == "list"


_ATOMS = st.sampled_from(
    ["1", "-2", "0.5", "\\frac{1}{3}", "x", "\\text{A}", "7\\%", "3_5", "\\pi"]
)


@given(st.lists(_ATOMS, min_size=1, max_size=5), st.sampled_from(["{}", "({})", "[{})"]))
def test_every_answer_equals_itself_in_both_modes(atoms, brackets):
    text = brackets.format(", ".join(atoms))
    for lenient in (False, True):
        assert decide(read(text), read(text), lenient=lenient)[0] is True


@given(st.lists(_ATOMS, min_size=2, max_size=5, unique=True), st.randoms(use_true_random=False))
def test_the_order_of_a_list_does_not_matter(atoms, rng):
    shuffled = list(atoms)
    rng.shuffle(shuffled)
    assert strict(", ".join(shuffled), ", ".join(atoms)) is not False


@given(st.text(max_size=40), st.text(max_size=40))
def test_strict_never_accepts_what_lenient_rejects(pred, reference):
    if decide(read(pred), read(reference), lenient=False)[0]:
        assert decide(read(pred), read(reference), lenient=True)[0]
