"""The fast part of tests/mutants: broken mechanisms are caught, and the runner itself can tell."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "mutants"))
import run as mutants
from catalogue import MUTANTS, Mutant

HERE = Path(__file__).parents[1]
DOCS = HERE.parent / "docs" / "mutants.md"


def test_every_place_to_edit_and_every_test_is_there():
    assert mutants.check_places(MUTANTS) == []


def test_the_catalogue_is_large_and_says_what_each_does():
    assert len(MUTANTS) >= 30 and len({m.name for m in MUTANTS}) == len(MUTANTS)
    assert all(m.what and m.edits and m.tests and all(old != new for _, old, new in m.edits) for m in MUTANTS)


def test_the_page_is_of_this_catalogue_and_shows_no_survivor():
    text = DOCS.read_text(encoding="utf-8")
    assert re.findall(r"^\| ((?!mutant |-).*?) \|", text, re.MULTILINE) == [m.name for m in MUTANTS]
    assert text.endswith(f"\n{len(MUTANTS)} mutants, 0 survived\n") and "**nothing**" not in text
    assert all(m.what in text for m in MUTANTS)


def test_the_fast_ones_are_caught():
    script = HERE / "mutants" / "run.py"
    done = subprocess.run(
        [sys.executable, script, "--fast", "--jobs", "1"], capture_output=True, text=True, timeout=900
    )
    count = sum(m.fast for m in MUTANTS)
    assert count >= 10 and done.stdout.splitlines()[-1] == f"{count} mutants, 0 survived", done.stdout + done.stderr
    assert done.returncode == 0


KEYS = "test_noise.py::test_keys_have_128_bits_and_every_purpose_its_own"
HARMLESS = Mutant("harmless", "nothing", (("noise.py", "CHUNK = 1 << 20", "CHUNK = 1 << 19"),), (KEYS,))
BROKEN = Mutant("broken", "a syntax error", (("noise.py", "CHUNK = 1 << 20", "CHUNK = 1 <<"),), (KEYS,))
CLUMSY = Mutant("clumsy", "an unknown name", (("streams.py", "self._keys = {", "self._keys = unknown or {"),), (KEYS,))


def test_the_runner_has_teeth(tmp_path):
    """A change that no test minds survives; one that cannot be imported, or crashes by itself, is an error and not caught."""
    program = (
        f"import sys; sys.path.insert(0, {str(HERE / 'mutants')!r})\nimport run\nfrom catalogue import Mutant\n"
        f"run.MUTANTS = {(HARMLESS, BROKEN, CLUMSY)!r}\n"
        f"page = ['--page', {str(tmp_path / 'page.md')!r}]\n"
        "raise SystemExit(run.main([*page, '--only', 'harmless', '--only', 'broken', '--only', 'clumsy']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900)
    said = done.stdout + done.stderr
    assert done.returncode == 1 and done.stdout.endswith("\n3 mutants, 3 survived\n"), said
    for line in ("passes    unbroken", "SURVIVED  harmless", "ERROR     broken", "ERROR     clumsy"):
        assert line in done.stdout, said


def test_a_place_that_is_gone_or_not_the_only_one_is_an_error(tmp_path):
    for old in ("no such text", "import"):
        gone = Mutant("gone", "nothing", (("noise.py", old, ""),), ("test_noise.py::no_such_test",))
        place, test = mutants.check_places([gone])
        assert "times, not once" in place and "there is no test" in test
        with pytest.raises(ValueError, match="times, not once"):
            mutants.prepare(tmp_path / str(len(old)), gone.edits)
