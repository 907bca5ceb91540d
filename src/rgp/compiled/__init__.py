"""Compiled models: the rules run once, while the graph is made, and what they give are ordinary results of its backward pass.

Dynamo turns a compiled module into a graph of torch operations. That graph is handed on to the module's own backend as one
function, which runs it under a capture (capture.py) with the rules of uncompiled models; so AOTAutograd sees what the rules
compute, forward and backward, and compiles it. No formula is written twice. In the place of side effects:

ports      inputs (zeros that take no memory) that nothing is computed from. What a rule gives to the slot of a parameter
           while the backward pass is traced, the graph returns as the gradient of a port
recorders  slots that keep what they are given, for `Sink`: it stands between a parameter and all its uses, so that its
           backward pass comes after theirs, and returns what was recorded. A gradient that arrives at it went around the
           rules, and is an error
carriers   are inputs, as they change from step to step

When the compiled graph runs, `Receive` takes the gradients of the ports and gives them to the run's own slots.

The files:

recorders  those slots
tracing    the sink, and the capture under which a graph is made
graph      a graph of a module, made once and called for each micro-batch
regions    the compiled modules of a model

Importing this imports torch's compiler, which takes a while: only a run with a compiled model does.
"""

from rgp.compiled.regions import Region, Regions

__all__ = ["Region", "Regions"]
