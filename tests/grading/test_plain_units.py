"""Units without \\text, and units that contradict the unit of the reference."""

import pytest

from bacr_grading import parse_reference
from bacr_grading.judge import judge
from bacr_grading.parsed_answer import read
from bacr_grading.plain_units import with_units

# Units of references. `_OTHER` contradicts each of them.
_UNITS = """
km/s|J/kg|m/s^2|rad/s|N/m|W/m^2|mol/L|g/mol|erg/s|cm/s|kg m/s|ft/s|mi/h|km/h|dollars/hour|cm^3/s
m s^{-1}|N m|J/(kg K)|m^2|m^3|cm^2|s^{-1}|eV|J|Hz|kg|N|V|Pa|kW|kWh|ms|meters|dollars|degrees
square meters|light years
"""
_OTHER = "11 m/s|10 ft/h|10\\text{ ft/h}|10 gallons|10\\text{ gal}|10 \\%|10 rad|10 t|10x|10 a/b"
# Letters that may be variables if the reference has no unit.
_PRODUCTS = """
10t|10 t|10m|10 x|10 a/b|10a/b|10 N/m|10 V/h|10 F/m|10 J|10J|10 N m|10 m^2|10m^2|10 m/s x|10\\,m
10 MN|10 ab/cd|10 abc/def|10 m/sin|10 x/hour|10 pi|10 kg x|10 km + s|10km s t|10 J/hav
"""


def texts(table: str) -> list[str]:
    return [text for line in table.split("\n") for text in line.split("|") if text]


def strictly(answer: str, reference: str) -> bool:
    """Grades an answer by rules, without math-verify."""
    verdict = judge(f"<answer>{answer}</answer>", reference, mode="strict")
    return getattr(verdict, "correct", False)


@pytest.mark.parametrize("unit", texts(_UNITS))
def test_a_unit_without_text_is_the_unit_with_text(unit):
    spellings = f"10 {unit}|10{unit}|10.0 {unit}|x = 10 {unit}|$10$ {unit}|10\\,{unit}|10"
    spellings += f"|10\\text{{ {unit}}}|10\\,\\mathrm{{{unit}}}"
    for reference in (f"10 \\text{{ {unit}}}", f"10\\;\\mathrm{{{unit}}}"):
        for answer in spellings.split("|"):
            assert strictly(answer, reference), (answer, reference)
        others = f"{_OTHER}|11 {unit}|10 {unit} or 11 {unit}"
        for answer in others.split("|"):
            assert not strictly(answer, reference), (answer, reference)


def test_the_percent_sign_contradicts_a_unit_and_nothing_else():
    for answer in ("10 \\%", "10\\%", "10 percent", "10", "0.1"):
        assert strictly(answer, "10\\%")
    assert not strictly("10 km/s", "10\\%")
    assert not strictly("10 dollars", "10\\%")


@pytest.mark.parametrize(
    ("reference", "answers"),
    [
        ("10\\text{ km/h}", "10 Km/h|10 KM/H|10 kph"),
        ("10\\text{ km/s}", "10 km / s|10 kilometers per second|10 km s^{-1}|10 km·s⁻¹"),
        ("10\\text{ m}/\\text{s}^2", "10 m/s²|10 meters per second squared|10\\text{ m s}^{-2}"),
        ("10\\text{ N}\\cdot\\text{m}", "10 N·m|10 Nm|10 N*m|10\\text{ J}|10 joules"),
        ("10\\text{ V/m}", "10 V/m|10\\text{ N/C}"),
        ("10\\text{ kg m/s}", "10 N s|10 kg\\cdot m/s"),
        ("10\\text{ mph}", "10 mi/h|10 miles per hour|10 miles/hour"),
        ("10\\text{ square meters}", "10 m^2|10 m²|10\\text{ m}^2|10 sq m"),
        ("10\\text{ m}", "10 m|10m|10\\,m"),
        ("10\\text{ rad/s}", "10\\text{ s}^{-1}"),
        ("10\\text{ dollars per hour}", "\\$10|10 dollars"),
        ("10^\\circ\\text{C}", "10^\\circ\\text{C}|10 °C"),
        ("10\\text{ xyz/q}", "10 xyz/q"),
        ("3\\times 10^8\\text{ m/s}", "3 \\times 10^8 m/s|3e8 m/s"),
        ("1,000\\text{ km/s}", "1,000 km/s|1000 km/s"),
        ("10\\text{ km/s}, 20\\text{ km/s}", "10 km/s, 20 km/s|20 km/s and 10 km/s"),
        ("10 km/s", "10|10 km/s|10\\text{ km/s}"),
        ("10", "10 km/s|10 J/kg|10 m/s^2|10 mol/L|10 kg m/s|10 eV|10 Hz|10 eggs/day|10\\,cm"),
    ],
)
def test_other_spellings_of_a_unit_are_right(reference, answers):
    wrong = [answer for answer in answers.split("|") if not strictly(answer, reference)]
    assert wrong == []


@pytest.mark.parametrize(
    ("reference", "answers"),
    [
        ("10\\text{ rad/s}", "10\\text{ Hz}|10 Hz|10 rad"),
        ("10\\text{ mW}", "10 MW|10\\text{ MW}"),
        ("10\\text{ dollars/hour}", "10 dollars/day|10 cents/hour"),
        ("10\\text{ m}^2", "10 m|10 m^3|10 cm^2|10\\text{ m}"),
        ("10\\text{ km/s}, 20\\text{ km/s}", "10 m/s, 20 m/s"),
        ("10 km/s", "10 m/s|10\\text{ m/s}|10 kg"),
    ],
)
def test_units_that_contradict_the_reference_are_wrong(reference, answers):
    right = [answer for answer in answers.split("|") if strictly(answer, reference)]
    assert right == []


@pytest.mark.parametrize("product", texts(_PRODUCTS))
def test_products_of_variables_are_not_units(product):
    """Without a unit in the reference, letters that can be variables are variables."""
    for reference in ("10", "x = 10"):
        assert not strictly(product, reference)
    assert not strictly("10", product)
    # The reference's variables are not removed from an answer that looks like a unit.
    assert with_units(read("10 km/s"), read("\\frac{10km}{s}")).text == "10 km/s"


@pytest.mark.parametrize("answer", ["10 km/s", "2\\pi", "x = 10 km/s", "10 kg m/s, 5"])
def test_the_text_of_a_reference_stays_as_it_is(answer):
    reference = parse_reference(answer)
    assert reference is not None and reference.text == answer
