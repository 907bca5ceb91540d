"""`rgp plan`: what a private run would cost and how noisy it would be, before anything is paid for.

models    a model's name -> its shapes on the meta device, and batches of the right form
lora      the same model with LoRA factors, for DP-LoRA
tally     live bytes and flops of every operation on meta tensors
step      one logical step of the real engine (or of plain training) under the tally
estimate  steps -> memory, flops, traffic, noise: method beside method
show      the tables; command the command
"""

from rgp.planning.estimate import METHODS, Question, plan

__all__ = ["METHODS", "Question", "plan"]
