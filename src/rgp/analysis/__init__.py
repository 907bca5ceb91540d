"""The two properties of gradients that RGP rests on (section 4 of the paper), measured. Reads private gradients.

spectra.py        one gradient matrix: stable rank, principal subspaces, what a projection leaves
follow.py         a training, repeated, with these numbers taken at every epoch
least_squares.py  the proposition and the remark on least squares, as an experiment
figures.py        figures like the paper's
command.py        `rgp analyze`
"""

from __future__ import annotations

NOT_PRIVATE = "NOT PRIVATE: computed from private data without noise. No guarantee covers it; do not publish."
