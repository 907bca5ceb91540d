"""Errors that users meet. Each says what was wrong, with which value, and what to do."""


class UnsupportedError(RuntimeError):
    """A trained parameter or a module whose per-example gradients cannot be computed."""


class LayoutError(UnsupportedError):
    """Which rows belong to which example cannot be told. If an example is alone, all of them are its own."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"{reason} (Or pass microbatch_size=1 to privatize: one example at a time is exact in any layout, and slow.)"
        )
        self.reason = reason


class WrongUseError(RuntimeError):
    """The training loop called things in an order, or with values, that private training cannot accept."""


class LedgerError(RuntimeError):
    """The record of releases is damaged, or does not belong to this run."""


class RankError(RuntimeError):
    """Another process of a distributed run died, left or differs, so none of them can continue."""
