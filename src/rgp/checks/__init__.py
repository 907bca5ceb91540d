"""What has to hold for epsilon to be true, and is checked while a run trains.

rehearsal  runs the loop's own body with examples replaced: does one example move another's gradient?
           (trial.py, items.py, comparing.py: its batches, their examples, the verdict)
passes     backward passes that the loop runs itself, for adversarial inputs or a generator
kinks      a hinge or a cap between examples, which may not be active yet
means      a mean whose divisor depends on everybody's labels, in every batch
guards     a loss, a gradient, a model or an optimizer that is not as it must be
writes     the loop changes no parameter, and no buffer in a way that depends on the examples
repeats    a row that is in the dataset several times
moved      the optimizer moves every parameter that received noise
"""
