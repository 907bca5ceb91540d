"""`rgp train`, `rgp eval` and `rgp demo`: from a config to a run folder.

config.py    typed settings of a run: presets, YAML, --set, all mistakes at once
setup.py     config -> data, model, optimizer, method
runner.py    the run: train, evaluate, save, resume
folder.py    what lies in a run's folder, and which of it may be published
card.py      the privacy card and summary.json
progress.py  what is shown meanwhile
demo.py      three runs side by side
command.py   the commands

Needs the extra rgp[demo]; nothing in the core imports it.
"""
