"""`python -m rgp`."""

from rgp.cli import main

main()
