"""Attacks on trained models. Their results are about private rows: no guarantee covers them, do not publish them."""
