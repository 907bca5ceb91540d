"""What may be said about a run, for whoever gets the model: its privacy card, and what it has spent so far.

content.py  a run -> the card, as JSON
text.py     the card as Markdown
meter.py    epsilon so far, step by step

Needs nothing but the core: `rgp train` and the Hugging Face Trainer both write cards.
"""

from rgp.cards.content import make_card
from rgp.cards.meter import EpsilonSoFar
from rgp.cards.text import card_text, short_unit

__all__ = ["EpsilonSoFar", "card_text", "make_card", "short_unit"]
