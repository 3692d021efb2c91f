"""Axes have round numbers, and curves that have an order have shades in that order."""

from bacr_jax.report.charts import doublings, number, shade


def test_ticks_are_round():
    assert doublings(60, 4100) == [64, 128, 256, 512, 1024, 2048, 4096]
    assert doublings(1, 2**20)[:2] == [1, 8]
    # Few doublings have halves and quarters between them.
    assert doublings(11, 36) == [12, 16, 24, 32] and doublings(19, 30) == [20, 24, 28]
    assert doublings(20.5, 21.5) == [20.5]
    assert number(1234.0) == "1,234" and number(0.25) == "0.25" and number(3e-9) == "3e-09"
    assert [shade(i, 3) for i in range(3)] == [0.0, 0.5, 1.0] and shade(0, 1) == 0.0
    assert number(1.5e6) == "1.5M" and number(999.6) == "1,000"
