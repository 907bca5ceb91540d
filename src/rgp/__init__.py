"""Private training of PyTorch models by reparametrized gradient perturbation (RGP)."""

from rgp._version import __version__
from rgp.accounting import Budget
from rgp.checking import check
from rgp.checkpoint import resume
from rgp.clips import AdaptiveClip, AutoClip, GroupClip
from rgp.errors import LedgerError, RankError, UnsupportedError, WrongUseError
from rgp.fixing import fix
from rgp.methods import (
    DPSGD,
    RGP,
    BiTFiT,
    DPPowerSGD,
    LinearProbe,
    NonPrivate,
    PowerSGD,
    ResidualOff,
    RGPRandom,
)
from rgp.plan import Plan, make_plan
from rgp.privatize import privatize
from rgp.public import without_labels
from rgp.run import Run
from rgp.tuning.api import tune

__all__ = [
    "DPSGD",
    "RGP",
    "AdaptiveClip",
    "AutoClip",
    "BiTFiT",
    "Budget",
    "DPPowerSGD",
    "GroupClip",
    "LedgerError",
    "LinearProbe",
    "NonPrivate",
    "Plan",
    "PowerSGD",
    "RGPRandom",
    "RankError",
    "ResidualOff",
    "Run",
    "UnsupportedError",
    "WrongUseError",
    "__version__",
    "check",
    "fix",
    "make_plan",
    "privatize",
    "resume",
    "tune",
    "without_labels",
]
