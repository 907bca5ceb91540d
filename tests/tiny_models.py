"""Configurations of the tiny Hugging Face models that tests build; needs transformers."""

from __future__ import annotations

from typing import Any

import transformers


def bert_config(vocabulary: int, positions: int, **options: Any) -> transformers.BertConfig:
    return transformers.BertConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        initializer_range=0.2,
        max_position_embeddings=positions,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **options,
    )


def gpt2_config(vocabulary: int, positions: int, **options: Any) -> transformers.GPT2Config:
    return transformers.GPT2Config(
        vocab_size=vocabulary,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=positions,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **options,
    )
