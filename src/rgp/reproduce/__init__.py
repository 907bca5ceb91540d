"""The tables and figures of the paper, again: `rgp reproduce`.

items.py     experiments/paper/*.yaml -> items (a table or figure) and their cells (one run each)
store.py     what is finished already: a cell is known by a hash of its settings
running.py   the cells that are not
checking.py  a few steps of each cell, with stand-ins where the data are not available
numbers.py   finished cells -> mean and standard error of every place in a table
claims.py    what the paper says, checked by these numbers
page.py, markdown.py, figures.py    for people
command.py   `rgp reproduce`
"""
