"""Data sets by name or by path. `load(DataSpec(name="digits"))`; see `rgp data list` and docs."""

from rgp.data.loading import load
from rgp.data.spec import Data, DataError, DataSpec, data_folder

__all__ = ["Data", "DataError", "DataSpec", "data_folder", "load"]
