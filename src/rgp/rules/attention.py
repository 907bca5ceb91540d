"""nn.MultiheadAttention: torch calls it as one operation, so its projections are done here, each by the rule for products."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rgp.errors import UnsupportedError
from rgp.rules import rule
from rgp.rules.copies import copies
from rgp.rules.linear import product


def _project(capture, x, weight, bias):
    """x W^T + b for x (T, m, E): examples go first for the rule, and back."""
    if capture.slot(weight) is None and capture.slot(bias) is None:
        return F.linear(x, weight, bias)
    y = product(capture, x.transpose(0, 1), weight, bias, transposed=True)
    return y.transpose(0, 1)


def _own(capture, x):
    """Each example's own copy of learned queries, keys or values (T, m, E), which are the same for all."""
    if capture.slot(x) is None:
        return x
    examples_first = capture.run(torch.transpose, x, 0, -2) if x.dim() == 3 else x
    if x.dim() == 2:  # without a dimension for examples
        return copies(capture, capture.run(torch.unsqueeze, x, 0), (1, *x.shape)).squeeze(0)
    return copies(capture, examples_first, tuple(examples_first.shape)).transpose(0, 1)


@rule(F.multi_head_attention_forward)
def multi_head_attention(capture, func, args, kwargs):
    return _attention(capture, *args, **kwargs)


def _attention(
    capture,
    query,
    key,
    value,
    embed_dim_to_check,
    num_heads,
    in_proj_weight,
    in_proj_bias,
    bias_k,
    bias_v,
    add_zero_attn,
    dropout_p,
    out_proj_weight,
    out_proj_bias,
    training=True,
    key_padding_mask=None,
    need_weights=True,
    attn_mask=None,
    use_separate_proj_weight=False,
    q_proj_weight=None,
    k_proj_weight=None,
    v_proj_weight=None,
    static_k=None,
    static_v=None,
    average_attn_weights=True,
    is_causal=False,
):
    if bias_k is not None or bias_v is not None or static_k is not None or static_v is not None:
        raise UnsupportedError(
            "nn.MultiheadAttention with add_bias_kv or static keys has no rule; use add_bias_kv=False"
        )
    given = {id(x): x for x in (query, key, value)}
    own = {name: _own(capture, x) for name, x in given.items()}  # query, key and value may be one
    query, key, value = own[id(query)], own[id(key)], own[id(value)]
    batched = query.dim() == 3
    if not batched:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    E, H = query.shape[2], num_heads
    if use_separate_proj_weight:
        biases = (None,) * 3 if in_proj_bias is None else capture.run(torch.chunk, in_proj_bias, 3)
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
        q, k, v = (_project(capture, x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    elif query is key and key is value:
        q, k, v = _project(capture, query, in_proj_weight, in_proj_bias).chunk(3, dim=-1)
    else:  # the joint matrix meets each input whole and a third of the result is used: simple, and exact
        projected = [_project(capture, x, in_proj_weight, in_proj_bias) for x in (query, key, value)]
        q, k, v = (y.chunk(3, dim=-1)[i] for i, y in enumerate(projected))

    T, m, S = q.shape[0], q.shape[1], k.shape[0]
    q, k, v = (t.reshape(t.shape[0], m, H, -1).permute(1, 2, 0, 3) for t in (q, k, v))
    if add_zero_attn:
        k, v = (torch.cat([t, t.new_zeros(m, H, 1, t.shape[-1])], dim=2) for t in (k, v))
    mask = _mask(attn_mask, key_padding_mask, q, m, H, T, S, add_zero_attn)
    if is_causal and attn_mask is None:
        raise UnsupportedError("nn.MultiheadAttention with is_causal=True needs attn_mask as well")
    p = dropout_p if training else 0.0
    weights_out = None
    if need_weights:
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        attention = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        mixed = F.dropout(attention, p, training) @ v
        weights_out = attention.mean(1) if average_attn_weights else attention
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
    mixed = mixed.permute(2, 0, 1, 3).reshape(T, m, E)
    out = _project(capture, mixed, out_proj_weight, out_proj_bias)
    if not batched:
        return out.squeeze(1), None if weights_out is None else weights_out.squeeze(0)
    return out, weights_out


def _mask(attn_mask, key_padding_mask, q, m, H, T, S, add_zero_attn):
    """One additive mask, broadcastable to (m, H, T, S), or None."""
    mask = None
    if attn_mask is not None:
        mask = _additive(attn_mask, q)
        mask = mask.view(m, H, T, S) if mask.dim() == 3 else mask.view(1, 1, T, S)
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask, q).view(m, 1, 1, S)
        mask = padding if mask is None else mask + padding
    if mask is not None and add_zero_attn:
        mask = F.pad(mask, (0, 1))
    return mask


def _additive(mask, like):
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))
    return mask.to(like.dtype)
