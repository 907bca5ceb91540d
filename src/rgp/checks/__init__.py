"""What has to hold for epsilon to be true, and is checked while a run trains.

rehearsal  the loop's own body, asked with examples replaced: does one example move another's gradient?
kinks      a hinge or a cap between examples, which may not be active yet
means      a mean whose divisor depends on everybody's labels, in every batch
guards     a loss, a gradient, a model or an optimizer that is not as it must be
writes     a forward pass changes no parameter and no buffer
moved      what got noise is moved by the optimizer
"""
