"""What has to hold for epsilon to be true, and is checked while a run trains.

guards    a loss, a gradient, a model or an optimizer that is not as it must be
vetting   model and loss keep the examples of a batch apart (probe.py, losses.py); collate_fn and augment: mixing.py
writes    a forward pass changes no parameter and no buffer
moved     what got noise is moved by the optimizer
padding   an example's loss does not depend on how long the others are
"""
