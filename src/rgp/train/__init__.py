"""`rgp train`, `rgp eval` and `rgp demo`: from a config to a run folder.

config.py    typed settings of a run: presets, YAML, --set, all mistakes at once
sections.py  its keys, what each means; allowed.py: what its value may be; checks.py: what is wrong
setup.py     config -> data, model, optimizer, method
runner.py    the run: train, evaluate, save, resume
meters.py    what it watches meanwhile: time, losses, epsilon so far, signals
weights.py   the trained weights, into model/ and back
evaluation.py a trained run, measured and attacked
folder.py    what lies in a run's folder, and which of it may be published
card.py      the privacy card and summary.json
progress.py  what is shown meanwhile
plain.py     what the same steps cost without this library
demo.py      three runs side by side
command.py   the commands

Needs the extra rgp[demo]; nothing in the core imports it.
"""
