"""The rehearsal: does one example move another's gradient? The loop's own body is asked, before anything is released.

Clipping bounds an example's influence only if its gradient does not depend on the others. No list of operations can tell:
batch statistics, a loss of shape (m, m), a mean over whichever labels are there, padding that counts, a collate_fn that
mixes. So, before its first batch, the loop is handed a few small batches, whose per-example gradients are compared and
thrown away; and again, with other examples, after one step (weights that were zero have moved), four, sixteen and so on
(a term of the loss may come in late):

    natural    up to eight examples
    others     half of them replaced by other examples, three times: the gradients of those that stayed must not move
    extreme    one replaced by the largest that was found, of another label if there is one: likewise
    whole      as many as a micro-batch has, and half of them replaced: a choice of the sixteen hardest shows only here
    fewer      half of them left out, the longest among them: likewise; a sum where a mean was promised shows here too
    copies     two copies of one example, under several seeds, if anything but dropout draws random numbers: what both
               have in common, and what differs from seed to seed, is randomness that examples share. Which of them
               share it depends on who else was drawn, so it must not be

In micro-batches of one, where no example can meet another, it is asked whether the loop keeps something of the batches before.

Dropout of activations is left out in all of them. All trials see the same random numbers (copies aside), and afterwards
Python's, numpy's and torch's generators are as they were, and so are the model's buffers.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from rgp.checks.sketches import sketch
from rgp.errors import UnsupportedError
from rgp.loading import Loading
from rgp.torchstate import as_tree, forked_rng, has_rows, kept_rng, seed_others

EXAMPLES = 8  # of a trial
POOL = 24  # examples that are looked at for it, at least
LARGEST_WHOLE = 64  # of the examples of a micro-batch that are rehearsed with at once
OTHERS = 3  # times that half of them are replaced
AGAIN = 4  # times as many steps go by before the next rehearsal
SEEDS = 24  # of copies: a layer that is left out once in twenty passes shows in one of them
DEALS = 4000  # of the copies to seeds, all of which have to be farther apart for randomness to count as shared
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4}  # relative to an example's whole gradient
COARSE = 1e-2
OTHER_SHAPES = 100  # times as much rounding where a trial has other shapes

Sketches = Mapping[str, Tensor]  # parameter -> (m, 3): norm and two projections of each example's gradient, float64


@dataclass
class Trial:
    """One small batch, and what the loop made of it."""

    batch: Any
    examples: int
    seed: int
    drew: bool  # whether making the batch, or the loop, drew random numbers
    weights: Tensor | None = None  # tells whether another trial had the same
    sketches: Sketches = field(default_factory=dict)
    inputs: list[Tensor] = field(default_factory=list)  # of the model: (m, 2), norm and a projection of each row
    outputs: list[Tensor] = field(default_factory=list)
    coarse: bool = False  # whether half precision was seen

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """For the time of the loop's pass: this trial's random numbers, and a look at the model's outputs."""
        hook = model.register_forward_hook(self._note, with_kwargs=True)
        with ExitStack() as stack:
            stack.callback(hook.remove)
            stack.enter_context(seeded(self.seed))
            before = _generators()
            yield
            self.drew = self.drew or not _same_generators(before)

    def _note(self, _module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for kept, tensors in ((self.inputs, (args, kwargs)), (self.outputs, as_tree(outputs))):
                for leaf in tree_leaves(tensors):
                    if has_rows(leaf, self.examples) and (leaf.is_floating_point() or kept is self.inputs):
                        self.coarse |= leaf.dtype in (torch.float16, torch.bfloat16)
                        kept.append(sketch(leaf.detach().reshape(self.examples, -1))[:, :2])


class CannotTellError(Exception):
    """The rehearsal has nothing to compare."""


class Rehearsal:
    """Asked by the loop: `for trial in rehearsal.trials(): ...`, which raises if examples are not kept apart.

    together: where passes are collective, whether something holds on all ranks.
    """

    def __init__(
        self,
        dataset: Any,
        loading: Loading,
        dtype: torch.dtype,
        seed: Callable[[int, int], int],
        together: Callable[[bool], bool] = bool,
    ) -> None:
        """seed: of a step and the number of a trial."""
        self._dataset, self._loading, self._seeds, self._together = dataset, loading, seed, together
        self._tolerance = TOLERANCE.get(dtype, COARSE)
        self._first: int | None = None  # the step that was rehearsed first
        self._next = 0  # how many steps after it the next one comes
        self._step = 0

    def is_due(self, step: int) -> bool:
        return self._first is None or step - self._first >= self._next

    def trials(self, step: int) -> Iterator[Trial]:
        """Each trial is yielded for the loop to work on it; it has its sketches when this goes on."""
        self._step = step
        try:
            yield from self._ask()
        except CannotTellError as error:
            warnings.warn(
                f"{error}, so it was not checked that the model, the loss and the batches keep examples apart, which epsilon "
                "rests on. Check it once with rgp.check(model, batch, loss_fn): see docs/pitfalls.md."
            )
        self._first = step if self._first is None else self._first
        self._next = 1
        while self._next <= step - self._first:
            self._next *= AGAIN

    @property
    def _released(self) -> str:
        if self._step == 0:
            return "Nothing was released."
        return f"It shows now, before step {self._step}: the releases so far may be affected, so do not rely on their epsilon."

    def _seed(self, number: int) -> int:
        return self._seeds(self._step, number)

    def _ask(self) -> Iterator[Trial]:
        problem, items = None, []
        try:
            items = self._items()
        except CannotTellError as error:
            problem = error
        if not self._together(len(items) > 1):
            if problem is not None:
                raise problem
            return
        m = min(EXAMPLES, len(items), self._loading.microbatch_size or EXAMPLES)
        chosen, spare = list(range(m)), [*range(m, len(items)), *range(m)]
        natural = self._trial([items[i] for i in chosen])
        yield natural
        if m == 1:
            yield self._trial([max(items[1:], key=_magnitude)])
            yield from self._ask_again(natural, items, chosen)
            return

        for number in range(OTHERS):
            rest = spare[number * (m - m // 2) :] + spare  # other ones each time, as long as there are any
            swapped = [*chosen[: m // 2], *_different(items, chosen[m // 2 :], rest)]
            others = self._trial([items[i] for i in swapped])
            yield others
            if not _same_weights(natural, others):  # the loop changes them by itself, as a WGAN's clamp does
                natural = self._trial([items[i] for i in chosen])
                yield natural
            yield from self._compare(natural, others, items, chosen, list(range(m // 2)))

        out, in_place = _extremes(items, chosen)
        kept = [i for i in chosen if i != out]
        extreme = self._trial([items[in_place if i == out else i] for i in chosen])
        yield extreme
        yield from self._compare(natural, extreme, items, chosen, kept)

        size = min(self._loading.microbatch_size or m, LARGEST_WHOLE, len(items) * 2 // 3)
        if size > m:
            whole = self._trial(items[:size])
            yield whole
            swapped = [
                *range(size // 2),
                *_different(items, list(range(size // 2, size)), list(range(size, len(items)))),
            ]
            half = self._trial([items[i] for i in swapped])
            yield half
            yield from self._compare(whole, half, items, list(range(size)), list(range(size // 2)))

        fewer = self._trial([items[i] for i in chosen[: m - m // 2]])
        yield fewer
        yield from self._compare(natural, fewer, items, chosen, list(range(m - m // 2)))

        if not self._together(not natural.drew):
            passes = []
            for number in range(SEEDS):
                copies = self._trial([items[0], items[0]], number=number + 1)
                yield copies
                passes.append(_rows(copies.sketches))
            _check_shared(torch.stack(passes), self._tolerance, self._released)

    # ------------------------------------------------------------------ the examples

    def _items(self) -> list[Any]:
        """Examples to rehearse with, the longest among the first; none if there is only one."""
        size, wanted = len(self._dataset), 3 * min(self._loading.microbatch_size or 0, LARGEST_WHOLE) // 2
        with seeded(self._seed(0)):
            indices = np.random.permutation(size)[: max(POOL, wanted)].tolist()
            try:
                items = [self._dataset[i] for i in indices]
            except Exception as error:
                raise CannotTellError(f"dataset[i] failed in this process ({type(error).__name__}: {error})") from error
        finite = [
            item for item in items if _is_finite(item)
        ]  # a NaN in one place would be everywhere, and hide the rest
        items = finite if len(finite) > 1 else items
        if size == 1:
            return []
        if all(_equal(items[0], item) for item in items[1:]):
            raise CannotTellError("the examples that were looked at are all alike")
        items.sort(key=_length)
        if (
            len(items) > EXAMPLES
        ):  # short ones, and the longest; the largest comes last: a running maximum shows when it is met
            items = [*items[: EXAMPLES - 1], items[-1], *items[EXAMPLES - 1 : -1]]
            largest = max(range(len(items)), key=lambda i: _magnitude(items[i]))
            if largest != EXAMPLES - 1 or _length(items[0]) == _length(items[largest]):
                items.append(items.pop(largest))
        return items

    def _trial(self, items: list[Any], number: int = 0) -> Trial:
        seed = self._seed(number)
        collate = self._loading.collate_fn or default_collate
        with seeded(seed):
            before = _generators()
            try:
                batch = collate([copy.deepcopy(item) for item in items])
                if self._loading.augment is not None:
                    batch = self._loading.augment(batch)
            except (
                Exception
            ) as error:  # items that cannot be copied; an error of the functions themselves will come again
                raise CannotTellError(f"no batch could be made of copies ({type(error).__name__}: {error})") from error
            drew = not _same_generators(before)
        return Trial(batch, len(items), seed, drew)

    # ------------------------------------------------------------------ the verdict

    def _compare(
        self, one: Trial, two: Trial, items: list[Any], chosen: list[int], stayed: list[int]
    ) -> Iterator[Trial]:
        """Raise if an example that stayed has another gradient in the second trial."""
        same_shapes = _shapes(one.batch) == _shapes(two.batch)
        moved, name = _moved(one, two, stayed)
        tolerance = max(self._tolerance, COARSE if one.coarse else 0.0) * (1 if same_shapes else OTHER_SHAPES)
        # random numbers of another shape are others, for every example
        apart = moved <= tolerance or (one.drew and not same_shapes)
        if moved > tolerance:
            self._check_reduction(one, two)
        if self._together(apart):
            return
        yield from self._ask_again(one, items, chosen, tolerance, another_rank=apart)
        if apart:
            return
        raise UnsupportedError(
            f"{_stage(one, two, stayed, same_shapes, tolerance)}: the gradient of an example changed, by {_percent(moved)} "
            f"and most at parameter {name!r}, when only other examples of the batch were "
            f"{'replaced' if one.examples == two.examples else 'left out'}. Then no clipping bounds one example's influence. "
            f"{_advice(one, two, stayed, same_shapes, tolerance)} {self._released} See docs/pitfalls.md."
        )

    def _ask_again(
        self,
        one: Trial,
        items: list[Any],
        chosen: list[int],
        tolerance: float | None = None,
        another_rank: bool = False,
    ) -> Iterator[Trial]:
        """Raise if the same examples have other gradients now."""
        again = self._trial([items[i] for i in chosen])
        yield again
        tolerance = max(self._tolerance, COARSE if one.coarse else 0.0) if tolerance is None else tolerance
        if not another_rank and _moved(one, again, list(range(len(chosen))))[0] > tolerance:
            raise UnsupportedError(
                "the loop gave other gradients for the same examples when it was asked again, under the same random numbers. It "
                "keeps something of earlier batches (a queue, running statistics), or draws from a generator of its own: take "
                f"torch's, which the run seeds. {self._released} (probe=False leaves this check out.) See docs/pitfalls.md."
            )

    def _check_reduction(self, natural: Trial, fewer: Trial) -> None:
        """A loss that is summed where a mean was promised, or the other way round, scales with the number of examples."""
        if natural.examples == fewer.examples:
            return
        norms = [_rows(trial.sketches)[:, ::3].norm(dim=1) for trial in (natural, fewer)]
        usual = [float(n[n.isfinite()].median()) if bool(n.isfinite().any()) else 0.0 for n in norms]
        if not all(usual):
            return
        rows = fewer.examples  # the same examples, unless they were sorted
        ratio = float((norms[1] / norms[0][:rows].clamp_min(1e-30)).median())
        expected = fewer.examples / natural.examples
        reduction = self._loading.loss_reduction
        scale, seen = (expected, "a sum over") if reduction == "mean" else (1 / expected, "divided by the number of")
        if abs(ratio / scale - 1) < 0.05:
            raise UnsupportedError(
                f"loss_reduction={reduction!r} was promised, and the loss is {seen} the examples: with {fewer.examples} of "
                f"{natural.examples} examples, gradients are {ratio:.2g} times as large, so one example more would scale "
                f"everybody's. Pass loss_reduction={'sum' if reduction == 'mean' else 'mean'!r}, or reduce the loss as promised. "
                f"{self._released}"
            )


def _same_weights(one: Trial, two: Trial) -> bool:
    return one.weights is None or two.weights is None or torch.equal(one.weights, two.weights)


def _stage(one: Trial, two: Trial, stayed: list[int], same_shapes: bool, tolerance: float) -> str:
    """Where examples met."""
    if same_shapes and not _same_rows(one.batch, two.batch, stayed):
        return "collate_fn or augment mixes the examples of a batch"

    def changed(before: list[Tensor], after: list[Tensor]) -> bool:
        return any(_relative(a[stayed], b[stayed]) > tolerance for a, b in zip(before, after, strict=False))

    if same_shapes and changed(one.inputs, two.inputs):
        return "the loop mixes the examples of a batch before it calls the model"
    if changed(one.outputs, two.outputs):
        if same_shapes:
            return "the model mixes the examples of a batch"
        return "an example's outputs depend on the padding that a longer example brings"
    return "the loss couples the examples of a batch, or something that the loop computes from the whole batch does"


def _advice(one: Trial, two: Trial, stayed: list[int], same_shapes: bool, tolerance: float) -> str:
    stage = _stage(one, two, stayed, same_shapes, tolerance)
    if stage.startswith(("collate_fn", "the loop")):
        return (
            "Mixup, cutmix, and statistics over the batch (its mean, its largest value) do that, and inputs without the examples "
            "in their first dimension (batch_first=True)."
        )
    if stage.startswith("the model"):
        return (
            "Batch statistics do that (rgp.fix(model) replaces batch norm; call .eval() on a frozen network or a teacher), and "
            "activations without the examples in their first dimension (batch_first=True)."
        )
    if stage.startswith("an example's"):
        return "Mask the padding in the model and in the loss (attention_mask, labels of -100), or pad to one length."
    return (
        "Compute one loss per example from its own outputs and labels, and take their mean. Common causes: outputs of shape "
        "(m, 1) against targets of shape (m,), a mean over the tokens, labels or classes that are there, class weights, "
        "contrastive and ranking terms, statistics over the batch."
    )


def _check_shared(passes: Tensor, tolerance: float, released: str) -> None:
    """passes (seeds, 2, K): the sketches of two copies of one example. Raise if they share what differs between seeds."""
    passes = passes.nan_to_num()
    scale = passes.norm(dim=2).amax().clamp_min(1e-30)
    spread = passes.flatten(0, 1).std(0)
    informative = spread > tolerance * scale
    if not bool(informative.any()):
        return  # whatever was drawn, gradients do not depend on it
    alike = bool((passes[:, 0] - passes[:, 1]).abs().amax() <= tolerance * scale)
    if alike or _nearer_than_by_chance(passes[:, :, informative] / spread[informative]):
        raise UnsupportedError(
            "the examples of a batch share random numbers: two copies of one example came out alike under each of several "
            "seeds, and otherwise under others. A flip drawn once for a batch does that, a layer that is left out for a whole "
            "batch (layerdrop, stochastic depth in batch mode), or dropout of weights. Which examples share a draw depends on "
            "who else is in the batch, so one example more would change everybody's gradient. Draw for each example on its own: "
            f"torch.rand(len(x)) in place of torch.rand(1). {released} See docs/pitfalls.md."
        )


def _nearer_than_by_chance(passes: Tensor) -> bool:
    """Whether two copies of one pass are nearer to each other than copies of different passes, by a permutation test."""
    distances = torch.cdist(passes[:, 0], passes[:, 1]).square().numpy()
    seeds, rng = np.arange(len(distances)), np.random.Generator(np.random.PCG64(0))
    own = distances.trace()
    return all(distances[seeds, rng.permutation(len(seeds))].sum() > own for _ in range(DEALS))


# ---------------------------------------------------------------------- sketches


def _rows(sketches: Sketches) -> Tensor:
    return torch.cat(list(sketches.values()), 1)


def _moved(one: Trial, two: Trial, stayed: list[int]) -> tuple[float, str]:
    """By how much the gradient of an example that stayed has changed, relative to its norm, and where most.

    A collate_fn or the loop may sort the examples: then so many gradients of the first trial have to be found again in the
    second, wherever they are.
    """
    before, after, names = _rows(one.sketches), _rows(two.sketches), list(one.sketches)
    if _in_place(one, two, stayed):
        before, after, stayed = before[stayed], after[stayed], list(range(len(stayed)))
    finite, still = before.isfinite().all(1), after.isfinite().all(1)
    replaced, added = len(before) - len(stayed), len(after) - len(stayed)
    if int(still.sum()) < int(finite.sum()) - replaced or int(finite.sum()) < int(still.sum()) - added:
        return float("inf"), names[0]  # one example made others NaN or Inf
    if not bool(finite.any()):
        return 0.0, ""
    scale = before[finite][:, ::3].norm(dim=1)  # the norms
    scale = (scale + 1e-6 * scale.amax() + 1e-30).view(-1, 1, 1)
    if replaced == added == 0:
        if bool((finite != still).any()):
            return float("inf"), names[0]
        found = (before - after)[finite].abs() / scale[:, 0]
        sure = len(found)
    else:
        change = (before[finite][:, None] - after[still][None]).abs() / scale
        found = change[torch.arange(len(change)), change.amax(2).argmin(1)]
        sure = min(len(stayed), len(found) - replaced)
        if sure <= 0:
            return 0.0, ""
    worst = int(found.amax(1).argsort()[sure - 1])
    return float(found[worst].max()), names[int(found[worst].argmax()) // 3]


def _in_place(one: Trial, two: Trial, stayed: list[int]) -> bool:
    """Whether the examples that stayed are in the same rows, in the batch and where the model got them."""
    return (
        _shapes_of_rows(one.batch) == _shapes_of_rows(two.batch)
        and _same_rows(one.batch, two.batch, stayed)
        and not any(_relative(a[stayed], b[stayed]) > COARSE for a, b in zip(one.inputs, two.inputs, strict=False))
    )


def _percent(moved: float) -> str:
    return f"{moved:.0%} of its norm" if moved < float("inf") else "turning into NaN or Inf"


def _relative(one: Tensor, two: Tensor) -> float:
    usable = one.isfinite().all(1) & two.isfinite().all(1)
    if one.shape != two.shape or not bool(usable.any()):
        return 0.0
    return float(((one - two).abs().amax(1) / (one[:, 0] + 1e-30))[usable].max())


# ---------------------------------------------------------------------- batches and items


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(as_tree(batch)) if isinstance(leaf, Tensor)]


def _shapes(batch: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in _tensors(batch)]


def _shapes_of_rows(batch: Any) -> list[torch.Size]:
    return [leaf.shape[1:] for leaf in _tensors(batch)]


def _same_rows(one: Any, two: Any, rows: list[int]) -> bool:
    pairs = zip(_tensors(one), _tensors(two), strict=True)
    return all(torch.equal(a[rows], b[rows]) for a, b in pairs if a.dim() and len(a) > max(rows))


def _values(item: Any) -> list[Any]:
    """The numbers of an item; tensors and arrays as tensors."""
    leaves = tree_leaves(as_tree(item))
    return [
        torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fiub" else leaf
        for leaf in leaves
    ]


def _equal(one: Any, two: Any) -> bool:
    return _differing(one, two) == 0


def _differing(one: Any, two: Any) -> int:
    """How many of their leaves differ."""
    a, b = _values(one), _values(two)
    if len(a) != len(b):
        return len(a) + len(b)
    return sum(not _alike(x, y) for x, y in zip(a, b, strict=True))


def _alike(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return torch.equal(x, y)
    try:
        return type(x) is type(y) and bool(x == y)
    except (TypeError, ValueError, RuntimeError):
        return False


def _is_finite(item: Any) -> bool:
    return all(bool(leaf.isfinite().all()) for leaf in _values(item) if isinstance(leaf, Tensor))


def _length(item: Any) -> int:
    """Its size, before it is padded."""
    return sum(
        leaf.numel() if isinstance(leaf, Tensor) else len(leaf) if isinstance(leaf, str) else 1
        for leaf in _values(item)
    )


def _magnitude(item: Any) -> float:
    sizes = [
        float(leaf.abs().max())
        for leaf in _values(item)
        if isinstance(leaf, Tensor) and leaf.numel() and not leaf.is_complex() and leaf.dtype != torch.bool
    ]
    return max(sizes, default=0.0)


def _different(items: list[Any], replaced: list[int], spare: list[int]) -> list[int]:
    """For each item to be replaced, the spare one that differs from it in most respects; of equals, the first not taken."""
    found: list[int] = []
    for i in replaced:
        scores = [(_differing(items[i], items[k]), k not in found) for k in spare]
        found.append(spare[max(range(len(spare)), key=scores.__getitem__)])
    return found


def _extremes(items: list[Any], chosen: list[int]) -> tuple[int, int]:
    """(which of the chosen items to replace, by which): one by the largest of all that were not chosen; where all were
    chosen, the largest by the smallest. Of several that would do, those that differ in most respects."""
    spare = [i for i in range(len(items)) if i not in chosen]
    if spare:
        largest = max(spare, key=lambda i: _magnitude(items[i]))
        return max(chosen, key=lambda i: (_differing(items[i], items[largest]), -_magnitude(items[i]))), largest
    largest = max(chosen, key=lambda i: _magnitude(items[i]))
    others = [i for i in chosen if i != largest]
    return largest, max(others, key=lambda i: (_differing(items[i], items[largest]), -_magnitude(items[i])))


# ---------------------------------------------------------------------- random numbers


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python's, numpy's and torch's generators under one seed, and afterwards as they were."""
    with kept_rng(), forked_rng(seed):
        seed_others(seed)
        yield


def _generators() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return random.getstate(), (name, np.asarray(keys).tobytes(), *rest), *(state.numpy().tobytes() for state in states)


def _same_generators(before: tuple[Any, ...]) -> bool:
    return before == _generators()
