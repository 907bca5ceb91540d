"""`rgp plan`: what a private run would cost and how noisy it would be, before anything is run.

models    a model's name -> its shapes on the meta device, and batches of the right form
lora      the same model with LoRA factors, for DP-LoRA
tally     live bytes and flops of every operation on meta tensors
step      one logical step of the real engine (or of plain training) under the tally
devices   attention, dropout and autocast as a GPU or a CPU would run them
question  what is asked
estimate  steps -> memory, flops, traffic, noise: method beside method
show      the tables; command the command
"""

from rgp.planning.estimate import plan
from rgp.planning.question import METHODS, Question

__all__ = ["METHODS", "Question", "plan"]
