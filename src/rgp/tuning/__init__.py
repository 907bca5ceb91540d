"""Private tuning: a search over settings whose epsilon covers the search itself (rgp tune, rgp.tune).

law.py          how many trials there are: a random number
profiles.py     the privacy profile of the best of them
accounting.py   their noise, for a budget of the whole search
scores.py       how the best is chosen: by public rows, or a noisy count on private ones
space.py        settings to try
plan.py         all that is fixed, and may be published, before the first trial
trials.py       the trials: secrets, run one after the other
release.py      the best one, its card and a page about the search
api.py          the same for your own training loop
command.py      rgp tune
"""
