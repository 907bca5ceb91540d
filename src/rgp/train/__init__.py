"""`rgp train` and `rgp eval`: from a config to a run folder.

config.py    typed settings of a run: presets, YAML, --set, all mistakes at once
sections.py  its keys and what each means; allowed.py: what a value may be; checks.py: mistakes of several keys together
setup.py     config -> data, model, optimizer, method
runner.py    the run: train, evaluate, save, resume
meters.py    what it watches meanwhile: time, losses, signals
weights.py   the trained weights, into model/ and back
evaluation.py a trained run, measured
folder.py    what a run's folder holds, and what of it may be published
card.py      the privacy card in model/ (rgp.cards), amended by audits and attacks; summary.py: summary.json
progress.py  what is shown meanwhile
plain.py     what the same steps cost without this library
command.py   the commands

Needs the extra rgp[demo]; nothing in the core imports it.
"""
