"""Errors that users meet. Each says what was wrong, with which value, and what to do."""


class UnsupportedError(RuntimeError):
    """A trained parameter or a module whose per-example gradients cannot be computed."""


class WrongUseError(RuntimeError):
    """The training loop called things in an order, or with values, that private training cannot accept."""


class LedgerError(RuntimeError):
    """The record of releases is damaged, or does not belong to this run."""


class RankError(RuntimeError):
    """Another process of a distributed run died, left or differs, so none of them can continue."""
