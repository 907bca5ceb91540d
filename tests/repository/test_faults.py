"""Every row of docs/faults.md but its silent ways. A row without a test fails, and so does a test without a row.

Where a row names an error or a warning, the function in tests/faults must end in it, with the words that the row quotes.
"""

from __future__ import annotations

import builtins
import re

import pytest

import rgp
from faults import FAULTS
from faults.small import TABLE

ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in TABLE.read_text().partition("## Silent ways")[0].splitlines()  # those have tests in tests/hostile
    if line.startswith("|") and not line.startswith(("|-", "| fault"))
]


def test_the_table_and_the_tests_are_the_same():
    names = [row[2] for row in ROWS]
    assert len(names) >= 20 and len(set(names)) == len(names)
    assert set(names) == set(FAULTS)


@pytest.mark.parametrize(("what", "gives", "name"), ROWS, ids=[row[2] for row in ROWS])
@pytest.mark.filterwarnings("ignore:noise_multiplier is 0")
def test_fault(what, gives, name, tmp_path):
    named = re.fullmatch(r'`(\w+)` "(.*)"', gives)
    if named is None:
        FAULTS[name](tmp_path)
        return
    kind = getattr(rgp, named[1], None) or getattr(builtins, named[1])
    expect = pytest.warns if issubclass(kind, Warning) else pytest.raises
    with expect(kind, match=re.escape(named[2])):
        FAULTS[name](tmp_path)
