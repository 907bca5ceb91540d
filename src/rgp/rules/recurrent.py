"""nn.RNN, nn.LSTM, nn.GRU and their cells: the fused kernels are written out step by step, with the same parameters.

Shapes: x (B, T, d), state h (B, H), gates (B, G) with G = H, 3 H or 4 H. B is m, or m k with an example's k sequences side
by side. What comes from the input is one product over all steps, W_ih x_t + b_ih, by the rule for products. What comes from
the state, a_t = W_hh h_(t-1) + b_hh, is computed inside, and its gradients over all steps make one outer product as well.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rgp.errors import LayoutError, UnsupportedError
from rgp.rules import rule
from rgp.rules.examples import by_example
from rgp.rules.generic import watched_inside
from rgp.rules.linear import product

State = tuple[Tensor, ...]  # (h,) or (h, c)


def _lstm(from_x: Tensor, a: Tensor, state: State) -> tuple[Tensor, ...]:
    i, f, g, o = (from_x + a).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(from_x: Tensor, a: Tensor, state: State) -> tuple[Tensor, ...]:
    (xr, xz, xn), (ar, az, an) = from_x.chunk(3, -1), a.chunk(3, -1)
    z = (xz + az).sigmoid()
    n = (xn + (xr + ar).sigmoid() * an).tanh()
    return ((1 - z) * n + z * state[0],)


def _tanh(from_x: Tensor, a: Tensor, state: State) -> tuple[Tensor, ...]:
    return ((from_x + a).tanh(),)


def _relu(from_x: Tensor, a: Tensor, state: State) -> tuple[Tensor, ...]:
    return ((from_x + a).relu(),)


_STEPS = {torch.lstm: _lstm, torch.gru: _gru, torch.rnn_tanh: _tanh, torch.rnn_relu: _relu}
_CELLS = {torch.lstm_cell: _lstm, torch.gru_cell: _gru, torch.rnn_tanh_cell: _tanh, torch.rnn_relu_cell: _relu}


@rule(*_STEPS)
def recurrent(capture, func, args, kwargs):
    if kwargs or len(args) != 9:
        return NotImplemented
    if isinstance(args[1], Tensor) and not args[1].is_floating_point():
        name = next(slot.entry.name for weight in args[3] if (slot := capture.slot(weight)) is not None)
        if capture.examples == 1:  # all rows are its own
            return _packed(capture, func, *args)
        raise LayoutError(
            f"parameter {name!r} met a PackedSequence, whose rows are sorted by length: which example they belong to cannot be "
            "told. Give the layer the padded tensor, and take the outputs at each example's own last step (or mask the rest)."
        )
    x, hx, weights, has_biases, layers, dropout, train, bidirectional, batch_first = args
    states = hx if isinstance(hx, tuple) else (hx,)
    x = x if batch_first else x.transpose(0, 1)
    directions = 2 if bidirectional else 1
    each = len(weights) // (layers * directions)
    finals: list[State] = []
    for layer in range(layers):
        results = []
        for direction in range(directions):
            at = layer * directions + direction
            given = _named(list(weights[at * each : (at + 1) * each]), has_biases)
            state = tuple(s[at] for s in states)
            results.append(_direction(capture, _STEPS[func], x, state, given, backwards=direction == 1))
        x = torch.cat([y for y, _ in results], -1) if bidirectional else results[0][0]
        finals += [final for _, final in results]
        if dropout and train and layer + 1 < layers:
            x = capture.run(F.dropout, x, dropout, True)
    return (x if batch_first else x.transpose(0, 1), *(torch.stack(kind) for kind in zip(*finals, strict=True)))


def _packed(capture, func, data: Tensor, sizes: Tensor, hx, weights, *options):
    """A PackedSequence of one example: its rows are its steps."""
    if len(sizes) != len(data):
        raise UnsupportedError(
            "a PackedSequence of one example has several sequences; give the layer the padded tensor"
        )
    y, *states = recurrent(capture, func, (data.unsqueeze(0), hx, weights, *options, True), {})
    return (y.squeeze(0), *states)


def _named(weights: list[Tensor], has_biases: bool) -> dict[str, Tensor | None]:
    names = ["ih", "hh", *(["b_ih", "b_hh"] if has_biases else [])]
    names += ["hr"] if len(weights) > len(names) else []
    return {"b_ih": None, "b_hh": None, "hr": None, **dict(zip(names, weights, strict=True))}


def _from_input(capture: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if capture.slot(weight) is None and capture.slot(bias) is None:
        return F.linear(x, weight, bias)
    return product(capture, x, weight, bias, transposed=True)


def _direction(
    capture, step, x: Tensor, state: State, weights: dict[str, Any], *, backwards: bool
) -> tuple[Tensor, State]:
    """One layer in one direction: outputs (B, T, H), final state."""
    from_x = _from_input(capture, x, weights["ih"], weights["b_ih"])
    hh, b_hh, hr = (weights[name] for name in ("hh", "b_hh", "hr"))
    slots = {name: capture.slot(weights[name]) for name in ("hh", "b_hh", "hr")}
    m, T = capture.examples, x.shape[1]
    order = list(reversed(range(T))) if backwards else list(range(T))
    before: list[Tensor] = []  # h_(t-1), and what the projection is applied to, in the order of the steps
    unprojected: list[Tensor] = []

    def call(from_x: Tensor, *state: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        with torch.no_grad():
            plain = [None if w is None else w.detach() for w in (hh, b_hh, hr)]
        ys: list[Any] = [None] * T
        inside, projected = [], []
        for t in order:
            before.append(state[0].detach())
            a = _with_grad(F.linear(state[0], plain[0], plain[1]))
            inside.append(a)
            state = step(from_x[:, t], a, state)
            if plain[2] is not None:
                unprojected.append(state[0].detach())
                projected.append(_with_grad(F.linear(state[0], plain[2])))
                state = (projected[-1], *state[1:])
            ys[t] = state[0]
        return [torch.stack(ys, 1), *state], [*inside, *projected]

    def tell(grads: list[Tensor]) -> None:
        g = torch.stack(grads[:T], 1)
        if slots["hh"] is not None:
            left, right = (by_example(y, m, 1, slots["hh"]) for y in (g, torch.stack(before, 1)))
            slots["hh"].add_outer(left, right.to(left.dtype))
        if slots["b_hh"] is not None:
            slots["b_hh"].add_dense(by_example(g, m, 1, slots["b_hh"]).sum(1))
        if slots["hr"] is not None:
            pairs = (torch.stack(grads[T:], 1), torch.stack(unprojected, 1))
            left, right = (by_example(y, m, 1, slots["hr"]) for y in pairs)
            slots["hr"].add_outer(left, right.to(left.dtype))

    trained = next((weights[name] for name, slot in slots.items() if slot is not None), None)
    if trained is None:
        (y, *final), _ = call(from_x, *state)
    else:
        y, *final = watched_inside(call, tell, trained, from_x, *state)
    return y, tuple(final)


def _with_grad(x: Tensor) -> Tensor:
    return x if x.requires_grad or not torch.is_grad_enabled() else x.requires_grad_()


@rule(*_CELLS)
def cell(capture, func, args, kwargs):
    x, hx, w_ih, w_hh, *biases = args
    b_ih, b_hh = biases if biases else (None, None)
    state = hx if isinstance(hx, (tuple, list)) else (hx,)
    found = _CELLS[func](_from_input(capture, x, w_ih, b_ih), _from_input(capture, state[0], w_hh, b_hh), tuple(state))
    return found if len(found) > 1 else found[0]
