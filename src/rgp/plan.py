"""The plan: what each parameter of a model gets. It is made once, printed, and followed to the letter.

carried  the weight's matrix (p x d) gets carriers L (p x r) and R (r x d); per-example gradients exist only for them
exact    its whole per-example gradient is clipped and released
frozen   not trained; it does not move, weight decay included
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import ceil, prod

import torch
from torch import Tensor, nn

from rgp.errors import UnsupportedError
from rgp.methods import Kind, Method, Treatment
from rgp.sharding import whole

LARGEST_EXACT_HEAD = 10**6
LARGEST_EXACT_TABLE = 10**6  # entries of an embedding or position table that a method with carriers trains
LARGEST_AUTO_RANK = 16
SMALL_MODEL = 10**5  # trained parameters below which DP-SGD was the better choice: docs/opacus.md has the numbers
AS_YOU_ASKED, NO_GRAD = "as you asked", "requires_grad is False"  # why a parameter gets what it gets
_NORMS = ("norm", "ln_", "layernorm", "rmsnorm", "bn")
_TOKENS = (
    "cls_token",
    "class_embedding",
    "mask_token",
    "distillation_token",
    "pos_embed",
    "position_embedding",
    "relative_position",
)


@dataclass(frozen=True)
class Entry:
    """One parameter's part of the plan. `p` and `d` are its shape as a matrix: `weight.flatten(1)`."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    treatment: Treatment
    rank: int = 0
    scale: float = 1.0
    why: str = ""
    aliases: tuple[str, ...] = ()
    fallback: str = "loop"  # what happens where it meets an operation without a rule

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def p(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def d(self) -> int:
        return prod(self.shape[1:])

    @property
    def noise_dimensions(self) -> int:
        """Dimensions in which noise reaches the weight: r (p + d - r) for a pair of carriers."""
        if self.treatment == "frozen":
            return 0
        return self.rank * (self.p + self.d - self.rank) if self.treatment == "carried" else self.size


@dataclass(frozen=True)
class Plan:
    """The entries of a model's parameters, in the model's order. `print(plan)` shows it as a table."""

    entries: tuple[Entry, ...]
    method: Method

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, name: str) -> Entry:
        for entry in self.entries:
            if name == entry.name or name in entry.aliases:
                return entry
        raise KeyError(f"no parameter {name!r} in the plan; it has {', '.join(e.name for e in self.entries[:4])}, ...")

    @property
    def trained(self) -> tuple[Entry, ...]:
        return tuple(e for e in self.entries if e.treatment != "frozen")

    @property
    def noise_dimensions(self) -> int:
        return sum(e.noise_dimensions for e in self.entries)

    @property
    def notes(self) -> tuple[str, ...]:
        """What somebody should know who has not read the table: what stays as it is, and that the model is small."""
        return tuple(note for note in (self.frozen_note() or self.share_note(), self.small_note()) if note)

    def frozen_note(self) -> str:
        """One sentence on what is not trained, how much of the model that is, and how to train it; "" if everything is.

        What was frozen before (requires_grad is False), by overrides, or by a method that trains heads or biases only is
        left out: that was the user's choice.
        """
        kinds = {kind for kind, treatment in self.method.treatments.items() if treatment != "frozen"}
        frozen = [e for e in self.entries if e.treatment == "frozen" and e.kind in kinds]
        by_method = [e for e in frozen if e.why not in (AS_YOU_ASKED, NO_GRAD)]
        if not by_method:
            return ""
        left = sum(e.size for e in by_method)
        names = ", ".join(repr(e.name) for e in by_method[:3]) + (", ..." if len(by_method) > 3 else "")
        return (
            f"{type(self.method).__name__} leaves {left:,} of the model's {self._size:,} parameters frozen ({names}) and trains "
            f"{self._share}; overrides={{{by_method[0].name!r}: 'exact'}} in the method trains one of them as well."
        )

    def share_note(self) -> str:
        """One sentence on the share that is trained where it is below a half; "" elsewhere, and for methods that say so."""
        if self.method.treatments["matrix"] == "frozen" or 2 * self._trained >= self._size:
            return ""
        reasons = sorted({e.why for e in self.entries if e.treatment == "frozen"})
        return (
            f"{type(self.method).__name__} trains {self._share} of the model's {self._size:,} parameters; the others are frozen "
            f"({', '.join(reasons)})."
        )

    @property
    def _size(self) -> int:
        return sum(e.size for e in self.entries)

    @property
    def _trained(self) -> int:
        return sum(e.size for e in self.trained)

    @property
    def _share(self) -> str:
        percent = 100 * self._trained / max(1, self._size)
        return f"{self._trained:,}, {percent:.0f}%" if percent >= 1 else f"{self._trained:,}, {percent:.2g}%"

    def small_note(self) -> str:
        """One sentence where carriers are used on a model so small that DP-SGD should be tried first; "" elsewhere."""
        carried = [e for e in self.entries if e.treatment == "carried"]
        if not (carried and self.method.private and self._trained < SMALL_MODEL):
            return ""
        return (
            f"Try method=rgp.DPSGD() first: {self._trained:,} trained parameters are few. Below {SMALL_MODEL:,}, carriers save "
            "little memory, and convolutional networks of that size came out two to five points better without them, at the "
            "same noise."
        )

    def __str__(self) -> str:
        header = ("parameter", "shape", "treatment", "rank", "noise dims", "why")
        rows = [
            (
                e.name,
                " x ".join(map(str, e.shape)) or "scalar",
                e.treatment,
                str(e.rank or ""),
                f"{e.noise_dimensions:,}",
                e.why,
            )
            for e in self.entries
        ]
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(6)]

        def line(row: tuple[str, ...]) -> str:
            return "  ".join(
                cell.rjust(w) if i in (3, 4) else cell.ljust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()

        foot = f"{self._trained:,} of {self._size:,} parameters trained; noise in {self.noise_dimensions:,} dimensions"
        notes = [note] if (note := self.small_note()) else []
        return "\n".join([line(header), line(tuple("-" * w for w in widths)), *map(line, rows), foot, *notes])


def make_plan(model: nn.Module, method: Method) -> Plan:
    """What `method` would do with each parameter of `model`, before anything runs.

    >>> from rgp import RGP
    >>> plan = make_plan(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), RGP(rank=2))
    >>> [entry.treatment for entry in plan]
    ['carried', 'exact', 'exact', 'exact']
    """
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    kinds = _kinds(model)
    entries = []
    for name, parameter in model.named_parameters():
        kind, why = kinds[id(parameter)]
        names = aliases[id(parameter)]
        entry = Entry(
            name,
            tuple(parameter.shape),
            kind,
            "frozen",
            why=why,
            aliases=tuple(n for n in names if n != name),
            fallback=method.fallback,
        )
        entries.append(_treat(entry, parameter, method, names))
    patterns = [*method.overrides, *(_rank_patterns(method))]
    every = [n for names in aliases.values() for n in names]
    unused = [p for p in patterns if not any(fnmatchcase(n, p) for n in every)]
    if unused:
        raise ValueError(f"pattern {unused[0]!r} matches no parameter of the model; names look like {every[0]!r}")
    return Plan(tuple(entries), method)


def _rank_patterns(method: Method) -> list[str]:
    rank = getattr(method, "rank", None)
    return list(rank) if isinstance(rank, dict) else []


def _treat(entry: Entry, parameter: Tensor, method: Method, names: list[str]) -> Entry:
    treatment: Treatment = method.treatments[entry.kind]
    why, rank = entry.why, 0
    if not parameter.requires_grad:
        treatment, why = "frozen", NO_GRAD
    elif entry.kind in ("embedding", "token") and method.carries and entry.size > LARGEST_EXACT_TABLE:
        treatment, why = "frozen", f"{why}, over 10^6 entries"
    elif entry.kind == "head" and treatment == "exact" and method.carries and entry.size > LARGEST_EXACT_HEAD:
        treatment, why = "carried", "head of over 10^6 entries"
    asked = [v for pattern, v in method.overrides.items() if any(fnmatchcase(n, pattern) for n in names)]
    if asked:
        why = AS_YOU_ASKED
        treatment, rank = ("carried", asked[-1]) if isinstance(asked[-1], int) else (asked[-1], 0)  # type: ignore[assignment]
        if treatment != "frozen" and not parameter.requires_grad:
            raise ValueError(
                f"overrides ask to train {entry.name!r}, whose requires_grad is False; set it to True before privatize"
            )
    if treatment != "frozen" and parameter.is_complex():
        raise UnsupportedError(
            f"parameter {entry.name!r} is complex, and its imaginary part would be lost. Freeze it (overrides={{{entry.name!r}: "
            "'frozen'}), or keep the two parts in real parameters and combine them with torch.complex."
        )
    if treatment == "carried":
        if len(entry.shape) < 2:
            if asked and any(name in method.overrides for name in names):  # a wider pattern may match biases too
                raise ValueError(f"{entry.name!r} has shape {entry.shape}: only matrices and kernels can be carried")
            treatment, rank = "exact", 0
        else:
            rank = rank or _rank(entry, parameter, method, names)
            if rank * (entry.p + entry.d) >= entry.size:
                treatment, rank, why = "exact", 0, "carriers would be no smaller"
    scale = method.head_scale if entry.kind == "head" and treatment == "exact" else 1.0
    return replace(entry, treatment=treatment, rank=rank, scale=scale, why=why)


def _rank(entry: Entry, parameter: Tensor, method: Method, names: list[str]) -> int:
    rank = getattr(method, "rank", None)
    if rank is None:
        raise ValueError(f"{method.name} has no carriers, so {entry.name!r} cannot be carried; use rgp.RGP")
    if rank == "auto":
        return min(
            LARGEST_AUTO_RANK, max(1, ceil(_stable_rank(whole(parameter.detach()).flatten(1)) - 1e-3)), entry.p, entry.d
        )
    if isinstance(rank, dict):
        found = [r for pattern, r in rank.items() if any(fnmatchcase(n, pattern) for n in names)]
        if not found:
            raise ValueError(f"rank has no pattern for {entry.name!r}; add a '*' pattern for the rest")
        rank = found[-1]
    return min(rank, entry.p, entry.d)


def _stable_rank(matrix: Tensor) -> float:
    """|M|_F^2 / |M|_2^2; 1 for a zero or meta matrix. Initial weights are public, so this reveals nothing."""
    if matrix.is_meta or not matrix.any():
        return 1.0
    matrix = matrix.to(torch.float32 if matrix.dtype in (torch.float16, torch.bfloat16) else matrix.dtype)
    top = torch.ones(matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
    for _ in range(20):
        top = matrix.T @ (matrix @ (top / top.norm().clamp_min(1e-30)))
    return float(matrix.square().sum() / top.norm().clamp_min(1e-30))


def _kinds(model: nn.Module) -> dict[int, tuple[Kind, str]]:
    """Kind of every parameter, by its module where that is known and by its shape and name where it is not."""
    kinds: dict[int, tuple[Kind, str]] = {}
    head = _head(model)
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}".lower()
            kind, why = _kind(module, leaf, name, parameter)
            if module is head and kind == "matrix":
                kind, why = "head", "classification head"
            elif module is head and kind == "bias":
                kind, why = "head_bias", "bias of the head"
            # a head tied to an embedding is the embedding
            if kinds.get(id(parameter), ("",))[0] not in ("embedding", "token"):
                kinds[id(parameter)] = (kind, why)
    return kinds


def _kind(module: nn.Module, leaf: str, name: str, parameter: Tensor) -> tuple[Kind, str]:
    named_so = "embedding" in type(module).__name__.lower() and leaf == "weight" and parameter.dim() == 2
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or named_so:
        return "embedding", "embedding"
    if any(word in name for word in _TOKENS):
        return "token", "learned token, position or relative bias"
    if (
        parameter.dim() >= 2
        and parameter.shape[0] == 1
        and not isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))
    ):
        return "token", "learned token or position"
    if parameter.dim() >= 2:
        return "matrix", ""
    if "bias" in leaf:
        return "bias", "bias"
    kind_of_module = type(module).__name__.lower()
    if any(word in kind_of_module for word in _NORMS):
        return "norm", "norm parameter"
    return ("norm", "norm parameter") if any(word in name for word in _NORMS) else ("other", "vector")


def _head(model: nn.Module) -> nn.Module | None:
    """The classification head: the last linear layer, unless it shares its weight with another module."""
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    last = None
    for module in model.modules():
        if isinstance(module, nn.Linear):
            last = module
    # a parametrized layer has no weight of its own
    return last if last is not None and uses.get(id(last._parameters.get("weight"))) == 1 else None
