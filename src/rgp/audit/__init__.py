"""Audits: a lower bound on epsilon from one training run, by canaries that are put in or left out by the toss of a coin."""

from __future__ import annotations

from rgp.audit.bounds import Guessed, guess, lower_bounds

__all__ = ["Guessed", "guess", "lower_bounds"]
