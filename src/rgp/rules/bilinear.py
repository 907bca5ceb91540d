"""F.bilinear, y_k = x^T A_k z + b_k: a product of the matrix A.flatten(1) with the outer product of x and z. And F.prelu."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rgp.rules import rule
from rgp.rules.linear import product


@rule(torch.bilinear, F.bilinear)
def bilinear(capture, func, args, kwargs):
    def call(input1, input2, weight, bias=None):
        pairs = (input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2)
        slot = capture.slot(weight)
        matrix = weight.detach().flatten(1)
        if slot is None:
            return capture.run(F.linear, pairs, weight.flatten(1), bias)
        matrix.requires_grad_()
        capture.remember(matrix, slot, False)
        return product(capture, pairs, matrix, bias, transposed=True)

    return call(*args, **kwargs)


@rule(torch.prelu, F.prelu)
def prelu(capture, func, args, kwargs):
    def call(input, weight):
        slope = weight if weight.numel() == 1 else capture.run(torch.reshape, weight, (-1, *[1] * (input.dim() - 2)))
        return torch.where(input > 0, input, capture.run(torch.mul, input, slope))

    return call(*args, **kwargs)
