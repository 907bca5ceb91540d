"""What methods are called in configs, arguments, summaries and reports: the one table of their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rgp.methods import (
    DPSGD,
    RGP,
    BiTFiT,
    DPPowerSGD,
    LinearProbe,
    Method,
    NonPrivate,
    PowerSGD,
    ResidualOff,
    RGPRandom,
)

METHODS: dict[str, type[Method]] = {
    "rgp": RGP,
    "rgp-random": RGPRandom,
    "dpsgd": DPSGD,
    "dp-powersgd": DPPowerSGD,
    "dp-lora": DPSGD,  # on a model with LoRA adapters: their factors are exact, all else is frozen
    "linear": LinearProbe,
    "bitfit": BiTFiT,
    "nonprivate": NonPrivate,
    "powersgd": PowerSGD,
    "residual-off": ResidualOff,
}
UNPROTECTED = tuple(name for name, method in METHODS.items() if not method.private)  # comparisons, run without noise
LABELS = {"rgp": "RGP", "dpsgd": "DP-SGD", "nonprivate": "no clipping, no noise"}


def method_from_json(saved: Mapping[str, Any]) -> Method:
    """The inverse of `Method.to_json`, for the methods of the table."""
    for kind in METHODS.values():
        if kind.__name__ == saved["name"]:
            return kind(**saved["fields"])
    raise ValueError(f"the run's method {saved['name']} is not one of rgp's: give it as method=")


def label(name: str) -> str:
    """A method's name as a page shows it."""
    return LABELS.get(name, name)
