"""Correlated noise: each step takes back part of the noise of the steps before it.

    c_0 w_t = z_t - sum_{k=1}^{b-1} c_k P_{t,t-k} w_{t-k}        z_t ~ N(0, sigma^2 I), independent

in units of the sensitivity: a step releases x_t + s_t w_t, where s_t is what one example can change x_t by, so an
adaptive clip norm changes nothing here. P is the identity while coordinates mean the same; `move` applies another one.

Formal guarantees (tests/test_correlated.py):
- the noise of a chain has the covariance sigma^2 C^{-1} C^{-T} of the matrix mechanism (docs/correlated-noise.md)
- after `forget` nothing of the past is in what follows
- no P makes a vector longer: `move` refuses one that does

The kept vectors are secrets like the seed: whoever has them can take the noise away. They cannot be pickled or copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rgp.bands import check_coefficients
from rgp.errors import WrongUseError
from rgp.noise import CHUNK, for_chunks

_ROUNDING = 1e-6  # relative; a norm of float32 numbers, taken in float64, is good to far less


class Chain:
    """The noise of successive steps. Keeps the last b - 1 vectors, fewer while there are fewer.

    >>> chain = Chain([0.8, 0.6])
    >>> [round(float(chain.next(torch.ones(1))), 4) for _ in range(3)]
    [1.25, 0.3125, 1.0156]
    """

    def __init__(self, coefficients: Sequence[float]) -> None:
        self._c: list[float] = check_coefficients(coefficients).tolist()
        self._past: list[Tensor] = []  # newest first

    @property
    def bands(self) -> int:
        return len(self._c)

    @property
    def length(self) -> int:
        """How many past vectors the next one takes something back of."""
        return len(self._past)

    def next(self, z: Tensor) -> Tensor:
        """w_t, in the place of z_t: fresh independent noise of standard deviation sigma, for this step alone."""
        if self._past and (z.numel() != self._past[0].numel() or z.dtype != self._past[0].dtype):
            raise WrongUseError(
                f"noise of {z.numel()} numbers of {z.dtype} after noise of {self._past[0].numel()} of "
                f"{self._past[0].dtype}: the released layout changed. `move` the past into the new one, or `forget` it."
            )
        if self.bands == 1:
            return z
        if len(self._past) == self.bands - 1:
            kept = self._past[-1]  # its last use is now, chunk by chunk, before it is overwritten
        else:
            kept = torch.empty_like(z, memory_format=torch.contiguous_format).view(-1)

        def work(part: Tensor, number: int) -> None:
            where = slice(number * CHUNK, number * CHUNK + part.numel())
            for c, past in zip(self._c[1:], self._past, strict=False):
                part.sub_(past[where], alpha=c)
            part.div_(self._c[0])
            kept[where].copy_(part)

        for_chunks(work, z)
        self._past = [kept, *(past for past in self._past if past is not kept)]
        return z

    def move(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every past vector w by P w: `change(w)`, which may work in place and may return another length.

        P must be linear, of norm at most 1, and fixed by what was released before this step's batch was drawn.
        """
        moved = []
        for past in self._past:
            before = float(torch.linalg.vector_norm(past, dtype=torch.float64))
            after = change(past).view(-1)
            length = float(torch.linalg.vector_norm(after, dtype=torch.float64))
            if not length <= before * (1 + _ROUNDING):
                self.forget()
                raise WrongUseError(
                    f"a change of coordinates made past noise longer, {length:.9g} after {before:.9g}: one example could "
                    "then change more than the accountant was told. The past has been forgotten."
                )
            moved.append(after)
        self._past = moved

    def secrets(self) -> list[Tensor]:
        """The past vectors, newest first: for the file that lives and is protected like the run's secret (checkpoint.py)."""
        return list(self._past)

    def restore(self, past: Sequence[Tensor]) -> None:
        """Go on from what `secrets` gave."""
        if len(past) >= self.bands:
            raise WrongUseError(f"{len(past)} past vectors for {self.bands} bands, which keep at most {self.bands - 1}")
        self.forget()
        self._past = [vector.clone().view(-1) for vector in past]

    def forget(self) -> None:
        """Start a new chain. Always safe; what the past had added stays in the weights."""
        for past in self._past:
            past.zero_()
        self._past = []

    def __reduce__(self):
        raise WrongUseError(
            "past noise cannot be saved or copied: whoever reads it can take the noise out of what was released. "
            "After a resume, compute it again from the run's streams or start a new chain."
        )
