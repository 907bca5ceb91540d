"""`import rgp` is cheap: no framework, no plotting, no accounting library, no compiler before it is needed."""

import subprocess
import sys

HEAVY = (
    "transformers",
    "typer",
    "rich",
    "matplotlib",
    "opacus",
    "riskcal",
    "dp_accounting",
    "safetensors",
    "randomgen",
    "sklearn",
    "torch._dynamo",
    "rgp.compiled",
)


def test_import_loads_nothing_optional():
    code = f"import rgp, sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_public_names():
    import rgp

    assert sorted(rgp.__all__) == sorted(set(rgp.__all__))
    assert all(hasattr(rgp, name) for name in rgp.__all__)
    assert {"privatize", "RGP", "DPSGD", "Budget", "Run", "Plan", "make_plan", "check", "fix"} <= set(rgp.__all__)
    assert {"UnsupportedError", "WrongUseError", "__version__"} <= set(rgp.__all__)
