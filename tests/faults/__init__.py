"""Faults of docs/faults.md, one function each; tests/repository/test_faults.py runs them and compares with the table."""

from faults import checkpoints, data, ledgers, loops, models
from faults.small import FAULTS

__all__ = ["FAULTS", "checkpoints", "data", "ledgers", "loops", "models"]
