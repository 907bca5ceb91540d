"""How numbers are shown."""

import math

import pytest

from rgp import naming
from rgp.rounding import finite, percent_up, round_down, round_up


@pytest.mark.parametrize("digits", [2, 3, 4])
def test_bounds_are_rounded_to_the_safe_side_and_no_further(digits):
    for k in range(1, 3000):
        value = k / 10**digits
        assert float(round_up(value, digits)) == value  # a value that has these digits is shown as it is
        above, below = float(round_up(value + 1e-7, digits)), float(round_down(value - 1e-7, digits))
        assert value < above <= value + 1.01 / 10**digits
        assert value - 1.01 / 10**digits <= below < value


def test_what_has_no_number_is_said_or_left_out():
    assert round_up(math.inf) == "infinite"
    assert percent_up(0.123401) == "12.35%" and percent_up(0.5, 1) == "50.0%"
    assert [finite(x) for x in (1, 0.5, math.inf, math.nan, True, "1", None)] == [1.0, 0.5, *[None] * 5]


def test_methods_without_protection_are_those_that_say_so():
    assert naming.UNPROTECTED == ("nonprivate", "powersgd", "residual-off")
    assert naming.label("rgp") == "RGP" and naming.label("dp-lora") == "dp-lora"
