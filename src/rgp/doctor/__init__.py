"""`rgp doctor`: is this installation fit for private training?

facts     what is installed, which device, can it write
selftest  sampling, noise, gradients and accounting, each against a computation of its own
command   the command
"""
