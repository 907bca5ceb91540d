"""The rehearsal: does one example move another's gradient? The loop's own body is tried out, before anything is released.

Clipping bounds an example's influence only if its gradient does not depend on the others. No list of operations can cover this:
batch statistics, a loss of shape (m, m), a mean over whichever labels are there, padding that counts, a collate_fn that
mixes. So, before its first batch, the loop is handed a few small batches, whose per-example gradients are compared and
thrown away; and again, with other examples, after one step (weights that were zero have moved), four, sixteen and so on
(a term of the loss may come in late):

    natural    up to eight examples
    others     half of them replaced by other examples, three times: the gradients of those that stayed must not move
    extreme    one replaced by the largest that was found, of another label if there is one: likewise
    whole      as many as a micro-batch has, and half of them replaced by the one with the largest gradient: a choice of
               the sixteen hardest examples shows only here
    autocast   natural, others and extreme once more if the loop uses autocast, which all other trials leave out: one scale
               for a whole tensor in half precision shows only here
    compiled   the same as natural, if the model is compiled: all others run it as it is written. Gradients must be the same
    fewer      half of them left out, the longest among them: likewise; a sum where a mean was promised shows here too
    copies     two copies of one example, under several seeds, if anything but dropout draws random numbers: what both
               have in common, and what differs from seed to seed, is randomness that examples share. Which of them
               share it depends on who else was drawn, so it must not be

Where rows cannot be assigned to examples (positions come first in an activation, say), the run goes on with one example at a
time, if a batch has the gradient that its examples add up to, and so does not mix them.

In micro-batches of one, where no example can meet another, the question is whether the loop keeps anything from earlier batches.

Dropout of activations is left out in all of them. All trials see the same random numbers (copies aside), and afterwards
Python's, numpy's and torch's generators are as they were, and so are the model's buffers.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from rgp.checks.comparing import (
    COARSE,
    ROUGH,
    advice_on,
    check_shared,
    moved,
    percent,
    rows_of,
    same_weights,
    stage_of,
    sums_differ,
)
from rgp.checks.items import (
    are_equal,
    came_out_otherwise,
    extremes,
    is_finite,
    length,
    magnitude,
    replacements,
    shapes_of,
)
from rgp.checks.trial import Trial, generators, same_generators, seeded
from rgp.errors import LayoutError, UnsupportedError
from rgp.loading import Loading

EXAMPLES = 8  # of a trial
POOL = 24  # examples that are looked at for it, at least
LARGEST_WHOLE = 64  # of the examples of a micro-batch that are rehearsed with at once
OTHERS = 3  # times that half of them are replaced
AGAIN = 4  # times as many steps go by before the next rehearsal
LOADING = 2**20  # in the numbers of seeds: those of the rows that are loaded one by one
SEEDS = 24  # of copies: a layer that is left out once in twenty passes shows in one of them
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4}  # relative to an example's whole gradient
# times as much rounding where a trial has other shapes; on a GPU other kernels may be chosen for them, and TF32
OTHER_SHAPES, ON_GPU = 3, 100


class CannotTellError(Exception):
    """The rehearsal has nothing to compare."""


class Rehearsal:
    """Used by the loop: `for trial in rehearsal.trials(): ...`, which raises if examples are not kept apart.

    together: where passes are collective, whether something holds on all ranks.
    """

    def __init__(
        self,
        dataset: Any,
        loading: Loading,
        dtype: torch.dtype,
        seed: Callable[[int, int], int],
        together: Callable[[bool], bool] = bool,
        compiled: bool = False,
    ) -> None:
        """seed: of a step and the number of a trial. compiled: whether the model has compiled modules."""
        self._compiled = compiled
        self._dataset, self._loading, self._seeds, self._together = dataset, loading, seed, together
        self._tolerance = TOLERANCE.get(dtype, COARSE)
        self._first: int | None = None  # the step that was rehearsed first
        self._next = 0  # how many steps after it the next one comes
        self._step = 0
        self._indices: list[int] = []  # of the examples to rehearse with
        self._rehearsed: list[Any] = []  # these examples

    def is_due(self, step: int) -> bool:
        return self._first is None or step - self._first >= self._next

    def trials(self, step: int) -> Iterator[Trial]:
        """Each trial is yielded for the loop to work on it; it has its sketches when this goes on."""
        self._step = step
        try:
            for trial in self._ask():
                yield trial
                if trial.unassigned is not None:
                    yield from self._go_alone(trial.unassigned)
                    break
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
    def microbatch_size(self) -> int | None:
        """1 if rows could not be assigned to examples, so that each has to go through the model alone."""
        return self._loading.microbatch_size

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
        self._rehearsed = items
        m = min(EXAMPLES, len(items), self._loading.microbatch_size or EXAMPLES)
        chosen, spare = list(range(m)), [*range(m, len(items)), *range(m)]
        if self._compiled and self._first is None:
            written, compiled = (self._trial(items, chosen, precise=False) for _ in range(2))
            compiled.compiled = True
            yield written
            yield compiled
            self._check_compiled(written, compiled)
        natural = self._trial(items, chosen)
        yield natural
        if m == 1:
            yield self._trial(items, [max(range(1, len(items)), key=lambda i: magnitude(items[i]))])
            yield from self._ask_again(natural, items, chosen)
            return

        for number in range(OTHERS):
            rest = spare[number * (m - m // 2) :] + spare  # new ones each time, as long as there are any
            swapped = [*chosen[: m // 2], *replacements(items, chosen[m // 2 :], rest)]
            others = self._trial(items, swapped)
            yield others
            if not same_weights(natural, others):  # the loop changes them by itself, as a WGAN's clamp does
                natural = self._trial(items, chosen)
                yield natural
            yield from self._compare(natural, others, items, chosen, list(range(m // 2)))

        out, in_place = extremes(items, chosen)
        kept = [i for i in chosen if i != out]
        in_place_of_one = [in_place if i == out else i for i in chosen]
        extreme = self._trial(items, in_place_of_one)
        yield extreme
        yield from self._compare(natural, extreme, items, chosen, kept)

        if not self._together(not natural.autocast):
            rough = self._trial(items, chosen, precise=False)
            yield rough
            for which, stayed in ((swapped, list(range(m // 2))), (in_place_of_one, kept)):
                others = self._trial(items, which, precise=False)
                yield others
                if same_weights(rough, others):
                    yield from self._compare(rough, others, items, chosen, stayed)

        size = min(self._loading.microbatch_size or m, LARGEST_WHOLE, len(items))
        if size > m:
            whole = self._trial(items, list(range(size)))
            yield whole
            hardest = int(rows_of(whole.sketches)[:, ::3].norm(dim=1).nan_to_num().argmax())
            half = self._trial(items, [*range(size // 2), *[hardest] * (size - size // 2)])
            yield half
            yield from self._compare(whole, half, items, list(range(size)), list(range(size // 2)))

        fewer = self._trial(items, chosen[: m - m // 2])
        yield fewer
        yield from self._compare(natural, fewer, items, chosen, list(range(m - m // 2)))

        if not self._together(not natural.drew):
            passes = []
            for number in range(SEEDS):
                copies = self._trial(items, [0, 0], number=number + 1)
                yield copies
                passes.append(rows_of(copies.sketches))
            check_shared(torch.stack(passes), self._tolerance, self._released)

    def _go_alone(self, error: LayoutError) -> Iterator[Trial]:
        """From now on one example at a time. Refuse where a batch has another gradient than its examples have alone."""
        items = self._rehearsed
        chosen = list(range(min(EXAMPLES, len(items))))
        warnings.warn(
            "from now on each example goes through the model alone, which is exact and slow; fallback='error' in the method "
            f"refuses instead. The reason: {error.reason}"
        )
        whole = self._trial(items, chosen)
        whole.plain = True
        yield whole
        alone = [self._trial(items, [i]) for i in chosen]
        yield from alone
        change, name = sums_differ(whole, alone)
        tolerance = self._tolerance_of(whole) * _of_other_shapes()
        if change > tolerance and not (whole.drew or any(trial.drew for trial in alone)):
            raise UnsupportedError(
                f"the model, the loss or the batches mix examples: the gradient of {len(chosen)} examples together differs, by "
                f"{percent(change)} and most at parameter {name!r}, from the sum of what each gives alone. To train on one "
                f"example at a time, as if there were no batches, pass microbatch_size=1. {self._released} See docs/pitfalls.md. "
                f"(Why each was tried alone: {error.reason})"
            )
        self._loading = replace(self._loading, microbatch_size=1)
        yield from self._ask()

    # ------------------------------------------------------------------ the examples

    def _items(self) -> list[Any]:
        """Examples to rehearse with, the longest among the first; none if there is only one."""
        size, wanted = len(self._dataset), min(self._loading.microbatch_size or 0, LARGEST_WHOLE)
        with seeded(self._seed(0)):
            indices = np.random.permutation(size)[: max(POOL, wanted)].tolist()
        try:
            items = self._loaded(indices)
            if self._first is None:
                self._check_order(indices[:EXAMPLES], items[:EXAMPLES])
        except UnsupportedError:
            raise
        except Exception as error:
            raise CannotTellError(f"dataset[i] failed in this process ({type(error).__name__}: {error})") from error
        if size == 1:
            return []
        found = list(zip(indices, items, strict=True))
        # one NaN would spread everywhere, and hide the rest
        finite = [pair for pair in found if is_finite(pair[1])]
        found = finite if len(finite) > 1 else found
        if all(are_equal(found[0][1], item) for _, item in found[1:]):
            raise CannotTellError("the examples that were looked at are all the same")
        found.sort(key=lambda pair: length(pair[1]))
        if len(found) > EXAMPLES:
            # short ones, and the longest; the largest comes last: a running maximum shows when it is met
            found = [*found[: EXAMPLES - 1], found[-1], *found[EXAMPLES - 1 : -1]]
            largest = max(range(len(found)), key=lambda i: magnitude(found[i][1]))
            if largest != EXAMPLES - 1 or length(found[0][1]) == length(found[largest][1]):
                found.append(found.pop(largest))
        self._indices = [index for index, _ in found]
        return [item for _, item in found]

    def _loaded(self, indices: list[int]) -> list[Any]:
        """These rows one after the other, each under random numbers of its own."""
        items = []
        for index in indices:
            with seeded(self._seed(LOADING + index)):
                items.append(self._dataset[index])
        return items

    def _check_order(self, indices: list[int], items: list[Any]) -> None:
        """A row is the same whichever rows were loaded before it. Random numbers are those of `_loaded`."""

        def differ(again: list[Any]) -> bool:  # the first row's predecessor is another each time
            pairs = zip(items[1:], again[1:], strict=True)
            return any(came_out_otherwise(a, b) for a, b in pairs if is_finite(a))

        if not differ(self._loaded(indices[::-1])[::-1]):
            return
        if not differ(self._loaded(indices)):
            raise UnsupportedError(
                "dataset[i] depends on the row that was loaded before it: in another order rows came out differently. Which rows "
                "come before one depends on who else was drawn, so no clipping bounds one example's influence. Make dataset[i] "
                f"of row i alone. {self._released} See docs/pitfalls.md."
            )
        warnings.warn(
            "dataset[i] came out differently when it was asked again under the same random numbers. If it draws from a generator "
            "of its own, steps after a crash cannot be repeated, and are charged again; use Python's, numpy's or torch's, which "
            "the run seeds. If it depends on what was loaded before, epsilon is too small: which rows those are depends on who "
            "else was drawn."
        )

    def _trial(self, items: list[Any], which: list[int], number: int = 0, *, precise: bool = True) -> Trial:
        """A batch of these items, loaded together where the dataset loads several at once: its transform may see them all."""
        seed = self._seed(number)
        many = getattr(self._dataset, "__getitems__", None)
        collate = self._loading.collate_fn or default_collate
        with seeded(seed):
            before = generators()
            try:
                if callable(many):
                    loaded = many([self._indices[i] for i in which])
                else:
                    loaded = [copy.deepcopy(items[i]) for i in which]
                batch = collate(loaded)
                if self._loading.augment is not None:
                    batch = self._loading.augment(batch)
            except (
                Exception
            ) as error:  # items that cannot be copied; an error of the functions themselves will come again
                raise CannotTellError(f"no batch could be made of copies ({type(error).__name__}: {error})") from error
            drew = not same_generators(before)
        return Trial(batch, len(which), seed, drew, precise)

    # ------------------------------------------------------------------ the verdict

    def _compare(
        self, one: Trial, two: Trial, items: list[Any], chosen: list[int], stayed: list[int]
    ) -> Iterator[Trial]:
        """Raise if an example that stayed has another gradient in the second trial."""
        same_shapes = shapes_of(one.batch) == shapes_of(two.batch)
        change, name = moved(one, two, stayed)
        tolerance = self._tolerance_of(one) * (1 if same_shapes else _of_other_shapes())
        # random numbers of another shape differ, for every example
        apart = change <= tolerance or (one.drew and not same_shapes)
        if change > tolerance:
            self._check_reduction(one, two)
        if self._together(apart):
            return
        yield from self._ask_again(one, items, chosen, tolerance, another_rank=apart)
        if apart:
            return
        raise UnsupportedError(
            f"{advice_on(one, two, stayed, same_shapes, tolerance)} As it is, "
            f"{stage_of(one, two, stayed, same_shapes, tolerance)}: the gradient of an example changed, by {percent(change)} "
            f"and most at parameter {name!r}, when only other examples of the batch were "
            f"{'replaced' if one.examples == two.examples else 'left out'}. Then no clipping bounds one example's influence. "
            f"{self._released} See docs/pitfalls.md."
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
        again = self._trial(items, chosen, precise=one.precise)
        yield again
        tolerance = self._tolerance_of(one) if tolerance is None else tolerance
        if not another_rank and moved(one, again, list(range(len(chosen))))[0] > tolerance:
            raise UnsupportedError(
                "the loop gave other gradients for the same examples when it ran again, under the same random numbers. It "
                "keeps something of earlier batches (a queue, running statistics), or draws from a generator of its own: take "
                f"torch's, which the run seeds. {self._released} (probe=False leaves this check out.) See docs/pitfalls.md."
            )

    def _tolerance_of(self, trial: Trial) -> float:
        if not trial.precise:
            return ROUGH
        return max(self._tolerance, COARSE if trial.coarse else 0.0)

    def _check_compiled(self, written: Trial, compiled: Trial) -> None:
        change, name = moved(written, compiled, list(range(written.examples)))
        if change > max(self._tolerance, COARSE if written.coarse else 0.0) * _of_other_shapes():
            raise UnsupportedError(
                f"the compiled model has other per-example gradients than the same model uncompiled, by {percent(change)} and "
                f"most at parameter {name!r}. Train it uncompiled, and tell us: it should not happen. {self._released}"
            )

    def _check_reduction(self, natural: Trial, fewer: Trial) -> None:
        """A loss that is summed where a mean was promised, or the other way round, scales with the number of examples."""
        if natural.examples == fewer.examples:
            return
        norms = [rows_of(trial.sketches)[:, ::3].norm(dim=1) for trial in (natural, fewer)]
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


def _of_other_shapes() -> int:
    return ON_GPU if torch.cuda.is_available() else OTHER_SHAPES
