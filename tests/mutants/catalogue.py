"""The mutants: name, what it does, where, and the tests that have to notice.

An edit is (file below src/rgp, text that must be there exactly once, text in its place), as small as it can be. Keep the
names of the tests few: all of them run against the mutant until one fails, and all against the unbroken code.
"""

from __future__ import annotations

from dataclasses import dataclass

Edit = tuple[str, str, str]


@dataclass(frozen=True)
class Mutant:
    name: str
    what: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    group: str = ""
    fast: bool = False  # run by `make test` too


def mutant(name: str, what: str, *edits: Edit, by: tuple[str, ...], fast: bool = False) -> Mutant:
    return Mutant(name, what, edits, by, fast=fast)


def group(title: str, *mutants: Mutant) -> list[Mutant]:
    return [Mutant(m.name, m.what, m.edits, m.tests, title, m.fast) for m in mutants]


SCALE = "test_noise.py::test_released_noise_has_sigma_C_per_parameter_and_jointly[method0-False]"
FUNCTION = "test_mechanism.py::test_what_a_run_publishes_is_a_function_of_its_releases[rgp]"
LEDGER_SAYS = "test_mechanism.py::test_the_ledger_says_what_was_done_at_every_step"
ONE_EXAMPLE = "test_clipping.py::test_one_example_moves_the_sum_by_at_most_C"
WHOLE_RUNS = "test_clipping.py::test_sensitivity_of_whole_runs[dpsgd-False]"
BAD = "test_clipping.py::test_a_bad_example_contributes_exactly_zero_and_is_counted[carried-nan]"
SAMPLER = "test_sampling.py::test_the_sampler_of_a_run_is_this_sampler"

NOISE = group(
    "Noise",
    mutant(
        "no noise",
        "adds none, and charges for it all the same",
        ("release.py", "clipped.sensitivity)) > 0:\n", "clipped.sensitivity)) > 1e9:\n"),
        by=(SCALE,),
        fast=True,
    ),
    mutant(
        "less noise",
        "two thirds of sigma C",
        ("mechanism.py", "return sigma * sensitivity if", "return 2 / 3 * sigma * sensitivity if"),
        by=(SCALE,),
        fast=True,
    ),
    mutant(
        "noise reused between steps",
        "every step has the noise of the first",
        ("noise.py", 'generator("noise", step, attempt', 'generator("noise", 0, attempt'),
        by=("test_noise.py::test_steps_and_parameters_of_a_run_are_independent",),
        fast=True,
    ),
    mutant(
        "noise of a crashed step again",
        "another attempt at a step, with other examples, has the first attempt's noise",
        ("noise.py", 'generator("noise", step, attempt', 'generator("noise", step, 0'),
        by=("test_noise.py::test_steps_and_attempts_are_independent",),
    ),
    mutant(
        "noise reused between chunks",
        "every million entries have the same noise",
        ("noise.py", "attempt, part=number)", "attempt, part=0)"),
        by=("test_noise.py::test_positions_are_independent_across_chunks",),
    ),
    mutant(
        "same noise for L and R",
        "the right half of each carried parameter's release has the noise of the left half",
        (
            "step.py",
            "        divisor = self.mechanism.batch_size(self.index)\n",
            "        divisor = self.mechanism.batch_size(self.index)\n"
            "        for name, slot in self.trained.carried.items():\n"
            "            both = noisy[self.gradients.where[name]]\n"
            "            cut_at = slot.entry.rank * slot.entry.p\n"
            "            count = min(cut_at, len(both) - cut_at)\n"
            "            both[cut_at : cut_at + count] = both[:count]\n"
            "        self.observer.released(self.index, noisy)\n",
        ),
        (
            "step.py",
            "if not used}\n        self.observer.released(self.index, noisy)\n",
            "if not used}\n",
        ),
        by=("test_noise.py::test_the_noise_of_L_and_R_is_independent",),
    ),
    mutant(
        "biases without noise",
        "vectors are released as they are",
        (
            "step.py",
            "        noisy = self.releases.release(",
            "        plain = clipped.total.clone()\n        noisy = self.releases.release(",
        ),
        (
            "step.py",
            "        self.observer.released(self.index, noisy)\n",
            "        for name, slot in self.trained.slots.items():\n"
            "            if len(slot.entry.shape) == 1:\n"
            "                where = self.gradients.where[name]\n"
            "                noisy[where] = plain[where]\n"
            "        self.observer.released(self.index, noisy)\n",
        ),
        by=(SCALE,),
    ),
    mutant(
        "noise for examples only",
        "an empty batch gets none: whoever sees a still weight knows that nobody was drawn",
        (
            "release.py",
            "clipped.sensitivity)) > 0:\n",
            "clipped.sensitivity)) > 0 and clipped.examples:\n",
        ),
        by=("test_noise.py::test_empty_batches_have_the_same_noise",),
    ),
    mutant(
        "sigma of another step",
        "noise always has the first step's sigma",
        ("mechanism.py", "sigma = self.sigma(step)\n", "sigma = self.sigma(0)\n"),
        by=("test_noise.py::test_a_clip_schedule_carries_the_noise_with_it",),
    ),
    mutant(
        "secrets of 32 bits",
        "seeds that agree in their last 32 bits give the same noise",
        ("streams.py", "hashlib.blake2b(str(seed).encode()", "hashlib.blake2b(str(seed % 2**32).encode()"),
        by=("test_noise.py::test_seeds_that_torch_would_confuse_give_other_streams",),
    ),
    mutant(
        "one key for all purposes",
        "noise can be computed from the numbers that carriers show",
        ("streams.py", "digest_size=16, person=purpose.encode()", "digest_size=16"),
        by=("test_noise.py::test_keys_have_128_bits_and_every_purpose_its_own",),
    ),
    mutant(
        "secure noise of one term",
        "the hardened noise is a single Gaussian, which can be undone",
        ("secure.py", "TERMS = 4", "TERMS = 1"),
        by=("test_noise.py::test_secure_noise_is_a_sum_of_four",),
    ),
)

CLIPPING = group(
    "Clipping",
    mutant(
        "no clipping",
        "every factor is 1",
        ("clips.py", "    if clip is None:\n        factors", "    if True:\n        factors"),
        by=(WHOLE_RUNS,),
        fast=True,
    ),
    mutant(
        "C for clipping is not C for noise",
        "clips to this step's C, and adds noise for the first step's",
        (
            "release.py",
            "noise_std(step, clipped.sensitivity)",
            "noise_std(step, self.mechanism.bound(0).sensitivity)",
        ),
        by=("test_noise.py::test_a_clip_schedule_carries_the_noise_with_it",),
        fast=True,
    ),
    mutant(
        "clipped by group, accounted flat",
        "groups are clipped to C_k each, and the noise is for the largest of them",
        (
            "clips.py",
            "return math.inf if self.norms is None else math.hypot(*self.norms, self.count_weight / 2)",
            "return math.inf if self.norms is None else math.hypot(max(self.norms), self.count_weight / 2)",
        ),
        by=("test_methods.py::test_the_noise_of_groups_is_a_multiple_of_their_joint_sensitivity", ONE_EXAMPLE),
    ),
    mutant(
        "clipped by block",
        "the norm is the largest block's, not that of all blocks together",
        (
            "clipping.py",
            "rows.view(len(rows), -1, BLOCK), dim=2).double().square().sum(1)",
            "rows.view(len(rows), -1, BLOCK), dim=2).double().square().amax(1)",
        ),
        by=("test_clipping.py::test_norms_of_rows_are_float64_sums",),
    ),
    mutant(
        "large parameters left out of the norm",
        "what deferred parameters contribute is summed and not measured",
        ("clipping.py", "squares, magnitude = squares + more, magnitude + terms", "magnitude = magnitude + terms"),
        by=("test_clipping.py::test_sensitivity_of_whole_runs[dpsgd-True]",),
    ),
    mutant(
        "biases left out of the norm",
        "vectors are summed with the others' factor and not measured",
        (
            "clipping.py",
            "        rest = squared_norms(self._rows[:, group.columns])\n",
            "        seen = self._rows.clone()\n"
            "        for slot in group.slots:\n"
            "            if len(slot.entry.shape) == 1:\n"
            "                seen[:, self.where[slot.entry.name]] = 0\n"
            "        rest = squared_norms(seen[:, group.columns])\n",
        ),
        by=(WHOLE_RUNS,),
    ),
    mutant(
        "head not clipped",
        "the last parameter is measured with the others, and then summed as it is",
        (
            "clipping.py",
            "            total[group.columns].addmv_(rows[:, group.columns].T, factors)\n",
            "            total[group.columns].addmv_(rows[:, group.columns].T, factors)\n"
            "            head = self.where[self.slots[-1].entry.name]\n"
            "            if head.stop <= self._columns:\n"
            "                total[head].addmv_(rows[:, head].T, 1 - factors)\n",
        ),
        by=(WHOLE_RUNS,),
        fast=True,
    ),
    mutant(
        "one norm for the micro-batch",
        "all examples are scaled by the norm of their mean, as plain training would",
        (
            "clipping.py",
            "        squares, magnitude = rest.clone(), torch.zeros_like(rest)\n",
            "        rest = rest.mean().expand(len(rest)).clone()\n"
            "        squares, magnitude = rest.clone(), torch.zeros_like(rest)\n",
        ),
        by=(WHOLE_RUNS,),
    ),
    mutant(
        "NaN let through",
        "an example without a finite gradient is not left out",
        ("clipping.py", "            rows[bad] = 0\n", "            pass\n"),
        by=(BAD,),
        fast=True,
    ),
    mutant(
        "NaN counted as a factor",
        "its factor is NaN, too: one example erases the sum",
        (
            "clips.py",
            "torch.where(squares.isfinite() & (factors >= info.tiny), factors, torch.zeros_like(factors))",
            "factors",
        ),
        (
            "clipping.py",
            "            factors = torch.where(bad, torch.zeros_like(factors), factors) if some_bad else factors\n",
            "",
        ),
        by=(BAD,),
    ),
    mutant(
        "stale gradients",
        "a parameter that a micro-batch does not use keeps the gradients of the one before",
        ("clipping.py", "                rows[:, self.where[slot.entry.name]] = 0  #", "                pass  #"),
        by=("test_clipping.py::test_a_slot_that_was_not_used_holds_nothing_from_before",),
    ),
    mutant(
        "a clip that is a little loose",
        "every factor is one percent too large",
        (
            "clipping.py",
            "            total[group.columns].addmv_(rows[:, group.columns].T, factors)\n",
            "            total[group.columns].addmv_(rows[:, group.columns].T, factors * 1.01)\n",
        ),
        by=(WHOLE_RUNS,),
    ),
    mutant(
        "views counted one by one",
        "each augmented view of an example has its own full weight",
        ("checks/guards.py", '(m if reduction == "mean" else 1) / views)', '(m if reduction == "mean" else 1))'),
        by=("test_methods.py::test_the_gradient_of_an_example_is_the_mean_over_its_views_before_clipping",),
    ),
)

SAMPLING = group(
    "Sampling and division",
    mutant(
        "shuffling accounted as Poisson",
        "batches are slices of a permutation, as a DataLoader makes them",
        (
            "sampling.py",
            '    indices = np.flatnonzero(streams.generator("sampling", step, attempt).random(size) < rate)\n',
            "    count = max(1, round(rate * size))\n"
            "    per_epoch = max(1, size // count)\n"
            '    order = streams.generator("sampling", step // per_epoch, attempt).permutation(size)\n'
            "    indices = np.sort(order[step % per_epoch * count :][:count])\n",
        ),
        by=(SAMPLER,),
    ),
    mutant(
        "batches of a fixed size",
        "a random subset of exactly the expected size",
        (
            "sampling.py",
            '    indices = np.flatnonzero(streams.generator("sampling", step, attempt).random(size) < rate)\n',
            '    order = streams.generator("sampling", step, attempt).permutation(size)\n'
            "    indices = np.sort(order[: max(1, round(rate * size))])\n",
        ),
        by=(SAMPLER,),
    ),
    mutant(
        "another rate than accounted",
        "draws a quarter more than q",
        ("sampling.py", ".random(size) < rate)", ".random(size) < 1.25 * rate)"),
        by=(SAMPLER,),
    ),
    mutant(
        "the same draw every step",
        "whoever is in the first batch is in all of them",
        (
            "sampling.py",
            'np.flatnonzero(streams.generator("sampling", step, attempt)',
            'np.flatnonzero(streams.generator("sampling", 0, attempt)',
        ),
        by=(SAMPLER,),
    ),
    mutant(
        "empty batches skipped",
        "a step that draws nobody is neither released nor charged",
        (
            "loop.py",
            "                if not parts:\n                    self._end_step()\n",
            "                if not parts:\n                    step.index, step.begun = step.index + 1, False\n",
        ),
        by=("test_loop_odd_batches.py::test_empty_draws_are_steps_like_any_other", FUNCTION),
    ),
    mutant(
        "divided by the drawn size",
        "the mean over whoever was drawn, which shows how many they were",
        (
            "step.py",
            "divisor = self.mechanism.batch_size(self.index)\n",
            "divisor = max(1, self.gradients.examples)\n",
        ),
        by=("test_loop_odd_batches.py::test_the_divisor_is_the_public_batch_size_whatever_was_drawn", FUNCTION),
        fast=True,
    ),
    mutant(
        "padding counted as an example",
        "short micro-batches are filled up with the first example",
        (
            "loading.py",
            "    return [part.tolist() for part in np.array_split(indices, parts)]\n",
            "    padded = np.concatenate([indices, np.full(-len(indices) % microbatch_size, indices[0])])\n"
            "    return [part.tolist() for part in np.array_split(padded, parts)]\n",
        ),
        by=(SAMPLER, "test_sampling.py::test_cutting_keeps_every_index_once"),
    ),
    mutant(
        "a cap that keeps the first",
        "max_batch keeps the examples with the smallest indices",
        (
            "sampling.py",
            'streams.generator("sampling", step, attempt, part=1).choice(indices, max_batch, replace=False)',
            "indices[:max_batch]",
        ),
        by=("test_sampling.py::test_a_cap_keeps_a_uniform_subset",),
    ),
    mutant(
        "a cap that is not accounted",
        "the accountant is not told of max_batch",
        ("ledger.py", 'r["sigma"], r.get("max_batch"))', 'r["sigma"], None)'),
        by=("test_sampling.py::test_a_cap_is_accounted",),
    ),
    mutant(
        "a batch left out after a failure",
        "the loop goes on when run.step failed: one example decides over the others",
        ("loop.py", "        if self._failed:\n", "        if False:\n"),
        by=("test_loop_left.py::test_a_swallowed_failure_does_not_leave_a_batch_out",),
    ),
)

PRIVATE = group(
    "What never was noised",
    mutant(
        "carriers from the private gradient",
        "the power method looks at the last step's sum before its noise",
        (
            "step.py",
            "        noisy = self.releases.release(",
            "        self.search.leak = clipped.total.double().sum().item()\n        noisy = self.releases.release(",
        ),
        (
            "carriers.py",
            "            weight=weight,\n            initial",
            "            weight=weight * torch.linspace(1, 1 + getattr(self, 'leak', 0.0), len(weight)).to(weight)"
            ".view(-1, *[1] * (weight.ndim - 1)),\n            initial",
        ),
        by=(FUNCTION,),
        fast=True,
    ),
    mutant(
        "carriers from the data",
        "the power method looks at an example of the batch to come",
        ("run.py", "step.trained.take()\n", "step.trained.take()\n        step.search.dataset = dataset\n"),
        (
            "carriers.py",
            "            weight=weight,\n            initial",
            "            weight=weight * torch.linspace(0, float(torch.as_tensor(self.dataset[0][0]).flatten()[0]), "
            "len(weight)).to(weight).view(-1, *[1] * (weight.ndim - 1)),\n            initial",
        ),
        by=("test_carriers.py::test_the_first_carriers_do_not_depend_on_the_data",),
    ),
    mutant(
        "C from the private norms",
        "an adaptive C follows the exact norms of the batch",
        (
            "step.py",
            "self.mechanism.clip.after(self.bound, noisy, divisor)",
            "self.mechanism.clip.after(self.bound, self.gradients.norms.new_tensor("
            "[(self.gradients.norms <= (self.bound.clip or 0)).double().sub(0.5).sum() * self.bound.count_weight]), divisor)",
        ),
        by=(FUNCTION.replace("[rgp]", "[rgp, adaptive clip]"),),
    ),
    mutant(
        "statistics of the forward pass kept",
        "batch norm's running means, and whatever else a pass writes, are published",
        ("step.py", "        self.writes.check()\n", ""),
        by=("repository/test_faults.py::test_fault[own_statistics]",),
    ),
    mutant(
        "a gradient past the capture",
        "a parameter used outside the capture is trained with its plain gradient",
        ("checks/guards.py", "if parameter.grad is not None:", "if False:"),
        by=("checks/test_guards.py::test_a_parameter_that_goes_around_the_capture_is_refused",),
    ),
    mutant(
        "examples that see each other",
        "the loop is not rehearsed: a model that mixes examples is not refused",
        ("checks/rehearsal.py", "return self._first is None or step", "return False and step"),
        by=("checks/test_mixing_modules.py::test_a_model_that_mixes_examples_is_refused",),
    ),
    mutant(
        "a rehearsal that is not compared",
        "gradients of examples that stayed may move as they like",
        ("checks/rehearsal.py", "        if self._together(apart):\n", "        if True:\n"),
        by=("checks/test_losses.py::test_a_loss_that_couples_examples_is_refused[contrastive-rgp]",),
        fast=True,
    ),
    mutant(
        "mixup",
        "half of the examples are replaced by themselves",
        (
            "checks/rehearsal.py",
            "swapped = [*chosen[: m // 2], *replacements(items, chosen[m // 2 :], rest)]",
            "swapped = chosen",
        ),
        (
            "checks/rehearsal.py",
            "extreme = self._trial(items, in_place_of_one)",
            "extreme = self._trial(items, chosen)",
        ),
        by=("checks/test_batches.py::test_mixtures_are_refused[rolled]",),
    ),
    mutant(
        "a sum for a mean",
        "a loss that is summed where a mean was promised scales with the number of examples",
        ("checks/rehearsal.py", "if abs(ratio / scale - 1) < 0.05:", "if False:"),
        by=("hostile/test_silent_ways.py::test_a_sum_where_a_mean_was_promised",),
    ),
    mutant(
        "random numbers that a batch shares",
        "a flip that is drawn once for a batch is not refused",
        ("checks/rehearsal.py", "if not self._together(not natural.drew):", "if False:"),
        by=("hostile/test_silent_ways.py::test_01_an_augmentation_that_is_drawn_once_for_a_batch[flip_all]",),
    ),
    mutant(
        "shared numbers under those of each example",
        "copies have to be exactly alike to be noticed",
        (
            "checks/comparing.py",
            "if alike or _nearer_than_by_chance(passes[:, :, informative] / spread[informative]):",
            "if alike:",
        ),
        by=(
            "hostile/test_silent_ways.py::test_01_an_augmentation_that_is_drawn_once_for_a_batch[flip_all_and_jitter]",
        ),
    ),
    mutant(
        "hinges between examples",
        "a cap on the mean loss, which is not active yet, is not refused",
        ("checks/kinks.py", "    if _meets_mixtures(loss, last, m):\n", "    if False:\n"),
        by=("checks/test_losses.py::test_a_cap_that_is_not_active_yet_is_refused",),
    ),
    mutant(
        "parameters of the loss",
        "a parameter that is not the model's gets its gradient without clipping and noise",
        ("checks/guards.py", "if foreign and any(", "if False and any("),
        by=("checks/test_mixing_models.py::test_a_parameter_that_is_not_the_models_is_refused",),
    ),
    mutant(
        "statistics kept through .data",
        "what a pass writes past torch's version counters is published",
        ("checks/writes.py", "self._bits = self._sums() if closely else None", "self._bits = None"),
        by=(
            "checks/test_mixing_models.py::test_a_forward_pass_that_keeps_something_of_the_data_is_refused[follows_data]",
        ),
    ),
    mutant(
        "batch norm of a teacher",
        "batch statistics under no_grad are not looked at",
        (
            "capture.py",
            "if func in _BATCH_NORMS and any(",
            "if func in _BATCH_NORMS and torch.is_grad_enabled() and any(",
        ),
        by=("hostile/test_silent_ways.py::test_04_batch_norm_of_a_teacher_under_no_grad",),
    ),
    mutant(
        "a public loss that sees private rows",
        "carriers are found in the batch that the loop has put in the place of public inputs",
        ("step.py", "            self.search.check_public(self.index)\n", "            pass\n"),
        by=("hostile/test_silent_ways.py::test_03_a_public_loss_that_sees_the_loops_variable",),
    ),
    mutant(
        "the same data again",
        "a second run over the same rows knows nothing of the first",
        ("earlier.py", "if data == id(dataset) or before == size:", "if False:"),
        by=("hostile/test_silent_ways.py::test_05_training_a_little_longer",),
    ),
    mutant(
        "earlier runs not counted",
        "`after` is written down, and left out of epsilon",
        ("ledger.py", "        return earlier + [\n", "        return [\n"),
        by=("hostile/test_silent_ways.py::test_05_training_a_little_longer",),
    ),
    mutant(
        "norms in bfloat16",
        "autocast of the loop reaches norms and sums",
        (
            "loop.py",
            "            with torch.enable_grad(), without_autocast():  #",
            "            with torch.enable_grad():  #",
        ),
        (
            "torchstate.py",
            "            with without_autocast():\n                return function",
            "            with ExitStack():\n                return function",
        ),
        by=("hostile/test_silent_ways.py::test_06_norms_and_sums_are_computed_outside_of_autocast_at_full_precision",),
    ),
    mutant(
        "rehearsed under autocast",
        "small couplings hide in the rounding of bfloat16, and large rounding is taken for one",
        ("step.py", "current.trial is not None and current.trial.precise", "False"),
        by=(
            "checks/test_no_false_alarm.py::test_the_rounding_of_autocast_is_no_coupling",
            "checks/test_no_false_alarm.py::test_a_small_coupling_does_not_hide_in_the_rounding_of_autocast",
        ),
    ),
    mutant(
        "never rehearsed under autocast",
        "what examples share in half precision alone is not noticed",
        ("checks/rehearsal.py", "if not self._together(not natural.autocast):", "if False:"),
        by=("hostile/test_review.py::test_a_scale_for_the_whole_batch_in_half_precision_alone",),
    ),
    mutant(
        "a secret left behind",
        "what a killed process had written of the secret stays in the folder",
        ("files.py", "for name in (path.name, path.name + NEW):", "for name in (path.name,):"),
        by=("hostile/test_silent_ways.py::test_11_a_secret_that_was_being_written_when_the_process_died",),
    ),
    mutant(
        "a pickled run",
        "the secret of the noise is in every pickle",
        ("run.py", "    def __reduce__(self) -> Any:\n", "    def _reduce(self) -> Any:\n"),
        ("streams.py", "    def __reduce__(self) -> Any:\n", "    def _reduce(self) -> Any:\n"),
        by=("test_streams.py::test_streams_cannot_be_pickled",),
    ),
    mutant(
        "dropout of the discarded draw",
        "a step that is drawn again has the first draw's dropout",
        (
            "streams.py",
            'self.generator("dropout", step, attempt, part=part',
            'self.generator("dropout", step, 0, part=part',
        ),
        by=("hostile/test_silent_ways.py::test_a_step_that_is_drawn_again_has_other_random_numbers",),
    ),
    mutant(
        "a checkpoint of another run",
        "ledgers do not say whose they are",
        ("privatize.py", '"secure_noise": secure_noise, "run": streams.run_id}', '"secure_noise": secure_noise}'),
        by=("hostile/test_silent_ways.py::test_a_checkpoint_of_step_0_belongs_to_its_run",),
    ),
    mutant(
        "means over everybody's tokens",
        "a mean whose divisor depends on all labels is not refused",
        (
            "checks/means.py",
            '    uneven = _differ(target != given.get("ignore_index", -100), m)\n',
            "    uneven = torch.zeros((), dtype=torch.bool)\n",
        ),
        by=("checks/test_means.py::test_a_mean_that_becomes_uneven_later_is_refused",),
    ),
    mutant(
        "a model that mixes examples goes alone",
        "rows cannot be assigned to examples, and it is not asked whether the model mixes them",
        (
            "checks/rehearsal.py",
            "        if change > tolerance and not (whole",
            "        if change > 9e9 and not (whole",
        ),
        by=("test_loop_alone.py::test_a_model_that_mixes_examples_as_well_is_refused",),
    ),
    mutant(
        "a loop that leaves examples out",
        "the mean over those that are left divides by their number, and is taken for one example's own",
        ("checks/means.py", 'return len(found) == 1 and not found & {"rows", "unknown"}', "return True"),
        by=("checks/test_means.py::test_a_loop_that_leaves_examples_out_later_is_refused",),
    ),
)

ACCOUNTING = group(
    "Ledger and accounting",
    mutant(
        "a quick epsilon from the rung below",
        "the upper bound that loops show at every step is that of fewer releases",
        (
            "accounting.py",
            "        rung = math.ceil(1.02 * rung)\n    return rung",
            "        last, rung = rung, math.ceil(1.02 * rung)\n    return rung if rung == count else last",
        ),
        by=("test_accounting.py::test_the_quick_epsilon_is_an_upper_bound_and_close",),
    ),
    mutant(
        "a quick epsilon capped by the plan",
        "releases that were charged twice after a crash do not show in the upper bound that loops print",
        (
            "accounting.py",
            "    if plan and all(e.count <= plan.get(replace(e, count=1), 0) for e in merged):",
            "    if plan:",
        ),
        by=("test_accounting.py::test_the_quick_epsilon_of_more_than_was_planned",),
    ),
    mutant(
        "two quantities, two events",
        "the count of an adaptive C is charged apart from the gradients of the same draw",
        (
            "clips.py",
            "    room = 1 - (sigma / (2 * noise)) ** 2\n",
            "    room = 1 - 0 * (sigma / (2 * noise)) ** 2\n",
        ),
        by=("test_methods.py::test_gradients_and_count_are_one_event",),
    ),
    mutant(
        "noise of several quantities added up wrongly",
        "the joint noise multiplier is that of the quantity with the least noise",
        (
            "accounting.py",
            "            total += (sensitivity / std) ** 2 if std > 0 else math.inf\n",
            "            total = max(total, (sensitivity / std) ** 2 if std > 0 else math.inf)\n",
        ),
        by=("test_accounting.py::test_combine", "test_accounting.py::test_two_quantities_of_one_batch_are_one_event"),
    ),
    mutant(
        "another sigma on record",
        "every line of the ledger has the first step's sigma",
        ("mechanism.py", '            "sigma": self.sigma(step),\n', '            "sigma": self.sigma(0),\n'),
        by=(LEDGER_SAYS,),
    ),
    mutant(
        "another rate on record",
        "every line of the ledger has the first step's q",
        ("sampling.py", '{"q": self.rate(step), ', '{"q": self.rate(0), '),
        by=(LEDGER_SAYS,),
    ),
    mutant(
        "delta of another run",
        "epsilon is computed for the default delta, whatever was asked for",
        (
            "release.py",
            "delta = self.mechanism.delta if delta is None else delta",
            "delta = accounting.default_delta(self.mechanism.dataset_size) if delta is None else delta",
        ),
        by=(LEDGER_SAYS,),
    ),
    mutant(
        "equal releases charged once",
        "lines that look the same count as one",
        (
            "ledger.py",
            '.setdefault(r.get("group"), Counter())[key] += 1',
            '.setdefault(r.get("group"), Counter())[key] = 1',
        ),
        by=("test_ledger.py::test_reading_gives_the_same_ledger", SAMPLER),
    ),
    mutant(
        "ledger written after the step",
        "the optimizer moves first; a crash between the two is a release nobody knows of",
        ("release.py", "return digest, self._record(step, digest, bound)", "return digest, True"),
        (
            "step.py",
            "        self.index += 1\n",
            "        self.releases._record(self.index, None, self.bound)\n        self.index += 1\n",
        ),
        by=("test_ledger.py::test_lines_are_synced_before_the_optimizer_steps",),
        fast=True,
    ),
    mutant(
        "ledger not synced",
        "a line may still be in memory when its release is used",
        (
            "ledger.py",
            "                rest = rest[os.write(self._file, rest) :]\n            os.fsync(self._file)\n",
            "                rest = rest[os.write(self._file, rest) :]\n",
        ),
        by=("test_ledger.py::test_lines_are_synced_before_the_optimizer_steps",),
    ),
    mutant(
        "a torn line forgotten",
        "a release whose line was cut off by a crash is not charged",
        ("ledger.py", "        if torn:\n            self._count_torn()\n", ""),
        by=("test_ledger.py::test_a_torn_last_line_counts_with_the_worst_charge",),
    ),
    mutant(
        "noise of a torn line drawn again",
        "the next attempt at the step takes the number that the torn line may have had",
        ("ledger.py", 'self._torn_attempt = max(self._torn_attempt, record["attempt"])', "pass"),
        by=("test_ledger.py::test_no_noise_of_a_torn_line_is_drawn_again",),
    ),
    mutant(
        "noise of a crashed step on another sum",
        "a step on record is released again though its sum came out differently",
        (
            "release.py",
            'return digest is not None and known[0]["digest"] == digest',
            "return True",
        ),
        by=("test_checkpoint.py::test_other_data_of_the_same_size",),
        fast=True,
    ),
    mutant(
        "an edited ledger believed",
        "hashes are not compared",
        ("ledger.py", '            right = record["hash"] == _hash(record) and', "            right = True or"),
        by=("test_ledger.py::test_every_edit_is_noticed",),
    ),
    mutant(
        "what is on record is forgotten when a resumed run is saved",
        "a second kill, before the steps on record were repeated, charges them twice",
        ("checkpoint.py", '"replay_from": run.releases.replay_from}', '"replay_from": run.ledger.count}'),
        by=("test_checkpoint.py::test_saved_again_before_what_is_on_record_was_repeated",),
    ),
    mutant(
        "an older ledger believed",
        "a ledger that was rolled back behind the checkpoint is taken",
        ("ledger.py", "        if held != head:\n", "        if False:\n"),
        by=("test_checkpoint_refused.py::test_a_rolled_back_ledger_is_refused",),
    ),
    mutant(
        "releases that were charged twice do not count",
        "the budget is compared with the steps taken, not with the ledger",
        (
            "release.py",
            "ledger.count + spare <= mechanism.steps and",
            "step + spare <= mechanism.steps and",
        ),
        by=("test_checkpoint.py::test_doubled_charges_end_the_run_before_the_budget_is_exceeded",),
    ),
    mutant(
        "epsilon of no noise is finite",
        "a release without noise costs nothing",
        (
            "accountants.py",
            "    if any(event.noise_multiplier == 0 for event in merged):\n        return math.inf\n",
            "    if any(event.noise_multiplier == 0 for event in merged):\n        return 0.0\n",
        ),
        by=("test_accounting.py::test_nothing_costs_nothing_and_no_noise_costs_everything",),
    ),
)

METHOD = group(
    "The method itself",
    mutant(
        "the core three times",
        "the last term of the rebuilt gradient is added in place of subtracted",
        ("reconstruct.py", "    At = At - (At @ Lt.T) @ Lt\n", "    At = At + (At @ Lt.T) @ Lt\n"),
        by=("rules/test_exactness_layers.py::test_mlp",),
    ),
)

RANKS = group(
    "Ranks",
    mutant(
        "noise reused between ranks",
        "every rank adds noise to its share, all of them the same",
        (
            "release.py",
            "        self.ranks.sum(clipped.total)\n",
            "        self._add_noise(step, clipped)\n        self.ranks.sum(clipped.total)\n",
        ),
        ("release.py", "        noisy = self._add_noise(step, clipped)\n", "        noisy = clipped.total\n"),
        by=("test_distributed.py::test_noise_is_added_once",),
    ),
    mutant(
        "an example on every rank",
        "all ranks work on the whole draw, so that each example counts as often as there are ranks",
        ("distributed.py", "return indices[self.rank :: self.size]", "return indices"),
        by=("test_distributed.py::test_every_example_is_on_one_rank_and_empty_shares_stay_in_step",),
    ),
)

RUNS = "test_correlated_runs.py::"
DEFAULT = "test_correlated_default.py::"
MATRIX = RUNS + "test_the_noise_of_a_run_is_that_of_the_matrix_mechanism[0.3]"
GOES_ALONG = RUNS + "test_past_noise_goes_along_when_carriers_turn"
AFRESH = RUNS + "test_what_cannot_be_computed_again_is_drawn_afresh_and_takes_nothing_back[microbatch]"
TURNS = RUNS + "test_nobody_takes_part_twice_in_b_steps_and_everybody_at_the_rate_that_is_charged"
GROUPS = RUNS + "test_a_release_is_charged_to_its_group_and_the_largest_counts"
SECRET = RUNS + "test_past_noise_is_a_secret_with_the_secrets_mode_and_life"

CORRELATED = group(
    "Correlated noise",
    mutant(
        "a sign in the chain",
        "past noise is added once more in place of taken back",
        ("correlated.py", "part.sub_(past[where], alpha=c)", "part.add_(past[where], alpha=c)"),
        by=(MATRIX,),
        fast=True,
    ),
    mutant(
        "a coefficient lost",
        "the oldest of the past vectors is not taken back",
        ("correlated.py", "zip(self._c[1:], self._past, strict=False)", "zip(self._c[1:-1], self._past, strict=False)"),
        by=(MATRIX,),
    ),
    mutant(
        "correlated noise without its unit",
        "noise is added as if one example could change the sum by 1, whatever C is",
        ("release.py", "self.chain.next(z), alpha=clipped.sensitivity)", "self.chain.next(z), alpha=1.0)"),
        by=(MATRIX,),
    ),
    mutant(
        "a P that is not short",
        "past noise of turned carriers is not taken out of the span of L",
        ("turning.py", "            At = At - (At @ frame.Lt.T) @ frame.Lt\n", "            pass\n"),
        by=(GOES_ALONG,),
    ),
    mutant(
        "past noise that stays behind",
        "carriers turn, and past noise keeps its old coordinates",
        ("release.py", "                self.chain.move(turning)\n", "                pass\n"),
        by=(GOES_ALONG,),
    ),
    mutant(
        "carriers that stay forget",
        "past noise is forgotten at every step",
        ("release.py", "        if self.ledger.drawn_before(step, self.attempt):\n", "        if True:\n"),
        by=(MATRIX,),
    ),
    mutant(
        "the chain kept after a redraw",
        "a step that is drawn again takes back what the discarded one took back already",
        ("release.py", "        if self.ledger.drawn_before(step, self.attempt):\n", "        if False:\n"),
        by=(AFRESH, RUNS + "test_a_torn_line_may_be_the_next_step_so_that_one_takes_nothing_back"),
    ),
    mutant(
        "a torn line that was no step",
        "a torn line does not count as a release of the step that followed",
        ("ledger.py", " or any(since < i < here for i in self._torn)", ""),
        by=(RUNS + "test_a_torn_line_may_be_the_next_step_so_that_one_takes_nothing_back",),
    ),
    mutant(
        "correlated noise reused after a replay",
        "every attempt at a step draws the same fresh noise",
        (
            "release.py",
            "std=self.mechanism.sigma(step), step=step, attempt=self.attempt)",
            "std=self.mechanism.sigma(step), step=step, attempt=0)",
        ),
        by=(AFRESH,),
    ),
    mutant(
        "noise of a release that was not made",
        "after an append that failed, its noise is taken back although nobody has seen it",
        ("release.py", "            self.chain.forget()  # it holds", "            pass  # it holds"),
        by=(RUNS + "test_a_release_that_could_not_be_recorded_leaves_nothing_to_take_back",),
    ),
    mutant(
        "groups that nobody keeps to",
        "a step draws from everyone, so that an example is drawn again before b steps are over",
        ("groups.py", "return np.flatnonzero(drawn & (groups == step % bands))", "return np.flatnonzero(drawn)"),
        by=(TURNS,),
    ),
    mutant(
        "a group sampled twice",
        "every group is drawn in two steps in a row",
        ("groups.py", "groups == step % bands", "groups == step // 2 % bands"),
        by=(TURNS,),
    ),
    mutant(
        "groups by index",
        "who is in which group can be told from the index, and a row added in front moves everyone",
        (
            "groups.py",
            '(streams.generator("sampling", DEALING).random(size) * bands).astype(np.int64)',
            "np.arange(size) % bands",
        ),
        by=("test_groups.py::test_groups_are_uniform_and_independent",),
    ),
    mutant(
        "q in place of q'",
        "the members of a group are drawn and charged at the rate of the whole dataset",
        (
            "sampling.py",
            "return group_rate(self.batch_sizes[step] / self.size, self.bands)",
            "return self.batch_sizes[step] / self.size",
        ),
        by=(TURNS, RUNS + "test_a_budget_is_calibrated_for_the_draws_of_one_group"),
    ),
    mutant(
        "turns promised away",
        "what correlated noise is worth is told as if carriers never turned",
        (
            "band_choice.py",
            "    here = noise_in_weights(c, steps, momentum=momentum, rates=rates, stay=stay)",
            "    here = noise_in_weights(c, steps, momentum=momentum, rates=rates)",
        ),
        by=(DEFAULT + "test_no_more_bands_than_steps_for_which_carriers_stay",),
    ),
    mutant(
        "turns that lose nothing",
        "noise in the weights is predicted as if a chain went on across a turn",
        ("bands.py", "        if age == 0:", "        if t == 0:"),
        by=(DEFAULT + "test_noise_with_turns_is_that_of_dense_matrices[3-20-4-0.9]",),
    ),
    mutant(
        "a rate nobody raised",
        "bands are on by default for Adam, which divides by the noise of single steps",
        ("workload.py", "        or not isinstance(optimizer, torch.optim.SGD)\n", ""),
        by=(DEFAULT + "test_elsewhere_noise_is_independent",),
    ),
    mutant(
        "correlated noise under a cap",
        "bands are on by default where a drawn batch is capped",
        ("workload.py", " or max_batch is not None", ""),
        by=(DEFAULT + "test_elsewhere_noise_is_independent",),
    ),
    mutant(
        "a promise on spent budget",
        "what bands are worth is computed at the whole budget, although earlier runs have spent of it",
        (
            "mechanism.py",
            "budget.epsilon - accounting.epsilon(spent, delta=delta, accountant=budget.accountant)",
            "budget.epsilon",
        ),
        by=(DEFAULT + "test_what_earlier_runs_spent_is_taken_off_first",),
    ),
    mutant(
        "T in place of ceil(T / b)",
        "noise is calibrated as if every example could be in every step",
        ("sampling.py", "return -(-steps // self.bands)", "return steps"),
        by=(RUNS + "test_a_budget_is_calibrated_for_the_draws_of_one_group",),
    ),
    mutant(
        "the last turn left out",
        "noise is calibrated for T / b turns, rounded down",
        (
            "sampling.py",
            "return -(-steps // self.bands)",
            "return steps // self.bands",
        ),
        by=(RUNS + "test_a_budget_is_calibrated_for_the_draws_of_one_group",),
    ),
    mutant(
        "a group not charged",
        "epsilon is that of the group that was drawn last for the first time",
        ("ledger.py", "                most |= count  #", "                most = count  #"),
        by=(GROUPS,),
    ),
    mutant(
        "a torn line that nobody pays",
        "whose it was is unknown, so nobody is charged",
        ("ledger.py", "total += counts.pop(None, Counter())", "counts.pop(None, Counter())"),
        by=(GROUPS,),
    ),
    mutant(
        "past noise that anyone can read",
        "the file has the mode of any other",
        ("checkpoint.py", "_safetensors().save(past), mode=0o600)", "_safetensors().save(past), mode=0o644)"),
        by=(SECRET,),
    ),
    mutant(
        "past noise that outlives the run",
        "the file is left when a finished run is closed",
        ("run.py", '(self.secret_file, *self.secret_file.parent.glob(PAST_NOISE + "*"))', "(self.secret_file,)"),
        by=(RUNS + "test_closing_a_finished_run_removes_past_noise",),
    ),
    mutant(
        "fresh noise is all that Adam is told of",
        "AdamCorrected takes out the variance of independent noise",
        ("step.py", "self.mechanism.noise_of_step(self.index", "self.mechanism.noise_std(self.index"),
        by=(RUNS + "test_adam_is_told_the_noise_of_a_single_step[7]",),
    ),
)

UNITS = group(
    "Units and splits",
    mutant(
        "a unit's sum for its mean",
        "whoever has more rows counts more, and is clipped all the same",
        ("members.py", "[1 / len(own) for own in rows for _ in own]", "[1.0 for own in rows for _ in own]"),
        by=("test_units.py::test_the_mean_gradient_of_each_unit_is_clipped_once",),
    ),
    mutant(
        "all rows of a unit",
        "the limit of rows in a step is not kept",
        ("members.py", "        if len(rows) <= most:", "        if True:"),
        by=("test_units.py::test_of_a_drawn_unit_each_row_is_used_equally_often_and_none_twice",),
    ),
    mutant(
        "the same rows of a unit in every step",
        "which rows are used is decided once",
        (
            "members.py",
            'generator("sampling", step, attempt, part=ROWS + unit)',
            'generator("sampling", 0, attempt, part=ROWS + unit)',
        ),
        by=("test_units.py::test_of_a_drawn_unit_each_row_is_used_equally_often_and_none_twice",),
    ),
    mutant(
        "rows of a unit drawn twice",
        "drawn with replacement",
        ("members.py", ".choice(rows, most, replace=False)", ".choice(rows, most, replace=True)"),
        by=("test_units.py::test_of_a_drawn_unit_each_row_is_used_equally_often_and_none_twice",),
    ),
    mutant(
        "pieces of a unit clipped apart",
        "a unit in several passes is clipped in each of them",
        ("loop.py", "ends_part = last and (group is None or group.ends)", "ends_part = last"),
        by=("test_units.py::test_the_mean_gradient_of_each_unit_is_clipped_once",),
    ),
    mutant(
        "first pieces of a unit forgotten",
        "only the last pass of a large unit counts",
        ("step.py", "return self.view == 0 and (self.group is None or self.group.begins)", "return self.view == 0"),
        by=("test_units.py::test_the_mean_gradient_of_each_unit_is_clipped_once",),
    ),
    mutant(
        "a unit's rows measured apart",
        "norms of large parameters leave out the products between rows",
        (
            "norms.py",
            "return unit_outer_squared_norms(self.left, self.right, rows)",
            "return rows.mean(self.squared_norms()) / rows.most",
        ),
        by=("test_units.py::test_large_parameters_are_clipped_by_unit_without_forming_their_gradients",),
    ),
    mutant(
        "equal ids that are told apart",
        "tensors as ids: every row is a person of its own",
        ("members.py", "given.item() if isinstance(given, Tensor) and given.numel() == 1 else given", "given"),
        ("members.py", "            if isinstance(name, Tensor):\n                raise TypeError\n", ""),
        by=("test_units.py::test_ids_that_cannot_be_right_are_refused_or_noticed",),
    ),
    mutant(
        "rates of rows for units",
        "q and delta are those of rows",
        ("privatize.py", "unit: Unit = Rows(size) if members is None else members.unit", "unit: Unit = Rows(size)"),
        by=("test_units.py::test_delta_and_epsilon_are_about_units",),
    ),
    mutant(
        "other units after a resume",
        "whose a row is may change between two sessions",
        ("checkpoint.py", 'private["units"] != members.digest(secret.secret)', "False"),
        by=("test_units_runs.py::test_a_run_goes_on_with_the_units_it_had",),
    ),
    mutant(
        "a unit on every rank",
        "all ranks work on the whole draw of units",
        ("loop.py", "self._loader.cut(ranks.share(units), step, attempt)", "self._loader.cut(units, step, attempt)"),
        by=("test_units_runs.py::test_a_unit_is_on_one_rank_and_their_number_does_not_matter",),
    ),
    mutant(
        "a split by place",
        "one row less in a file moves others between training and test",
        (
            "data/splits.py",
            "[_is_held_out(key, share, seed) for key in keys]",
            "[_is_held_out(str(i).encode(), share, seed) for i, _ in enumerate(keys)]",
        ),
        by=("data/test_data.py::test_one_row_less_in_a_file_is_one_row_less_on_one_side",),
    ),
    mutant(
        "a person on both sides",
        "rows of one person are split between training and test",
        (
            "data/loading.py",
            "if ids is None else zip(map(str, ids), strict=True)",
            "if True else zip(map(str, ids), strict=True)",
        ),
        by=("train/test_units_train.py::test_a_person_is_on_one_side_of_the_split",),
    ),
)

TUNING = group(
    "Tuning",
    mutant(
        "number of trials fixed after all",
        "the number of trials is the law's mean, not drawn",
        ("tuning/trials.py", 'self.count = law.draw(streams.generator("sampling", 0))', "self.count = round(law.mean)"),
        by=("tuning/test_tuning_api.py::test_the_number_of_trials_follows_the_law",),
    ),
    mutant(
        "score without noise",
        "the best is chosen by the exact count",
        (
            "tuning/scores.py",
            "score.noise * float(rng.standard_normal())",
            "0 * score.noise * float(rng.standard_normal())",
        ),
        by=("tuning/test_tuning_api.py::test_a_private_score_has_the_noise_that_it_is_charged_for",),
    ),
    mutant(
        "a person's rows counted one by one in a score",
        "somebody with thirty rows changes a private score by thirty",
        ("tuning/running.py", 'if score.unit == "row" or members is None:', "if True:"),
        by=("tuning/test_tuning_units.py::test_a_person_with_many_rows_adds_at_most_one_to_a_score",),
    ),
    mutant(
        "a search pays for correlated noise as if everybody were drawn from",
        "the sampling rate of a group's turn is that of all rows",
        (
            "tuning/plan.py",
            "bands=self.bands, sampling_rate=rate,",
            "bands=self.bands, sampling_rate=rate / self.bands,",
        ),
        by=("tuning/test_tuning_api.py::test_correlated_noise_is_paid_for_by_the_turns_of_a_group",),
    ),
    mutant(
        "a trial goes on where an earlier one ended",
        "what a losing trial learned is released with the best one",
        ("tuning/api.py", "            _earlier=tuple(earlier),\n", ""),
        by=("hostile/test_promise_search.py::test_a_trial_that_trains_on_from_an_earlier_one",),
    ),
    mutant(
        "a run beside the one that is paid for",
        "what a trial released by other runs than its own is not looked at",
        ("earlier.py", "    for found in _noticed:\n        found.append(ledger)\n", ""),
        by=("hostile/test_promise_search.py::test_a_run_beside_the_one_that_is_paid_for",),
    ),
    mutant(
        "score not charged",
        "a private score is free",
        ("tuning/scores.py", "return () if self.noise is None else (Event(1.0, self.noise),)", "return ()"),
        by=("tuning/test_tuning_api.py::test_epsilon_is_the_searchs_by_an_independent_computation",),
    ),
    mutant(
        "second best released",
        "another trial than the best",
        (
            "tuning/trials.py",
            "return max(sorted(scores), key=scores.__getitem__, default=None)",
            "return sorted(scores, key=scores.__getitem__)[-2:][0] if scores else None",
        ),
        by=("tuning/test_tuning_api.py::test_the_best_is_the_highest_and_the_first_of_equals",),
    ),
    mutant(
        "trial's epsilon on the card",
        "the card promises one trial's epsilon for the search",
        (
            "tuning/release.py",
            '        "epsilon": plan.epsilon,\n        "delta"',
            '        "epsilon": plan.trial_epsilon,\n        "delta"',
        ),
        by=(
            "tuning/test_tuning_command.py::test_the_card_and_the_page_promise_what_the_search_costs_and_not_the_trial",
        ),
    ),
    mutant(
        "exact accuracy on protected rows",
        "the card of a search holds the exact accuracy on the rows whose count was noised",
        ("tuning/release.py", 'if not (name == "perplexity" or name.startswith("accuracy"))', "if name"),
        by=("tuning/test_tuning_command.py::test_a_private_score_leaves_nothing_exact_of_its_rows",),
    ),
    mutant(
        "search charged as one trial",
        "choosing costs nothing",
        (
            "composition.py",
            "dp_event.RepeatAndSelectDpEvent(dp_event.ComposedDpEvent(runs), mean, shape)",
            "dp_event.ComposedDpEvent(runs)",
        ),
        by=("tuning/test_tuning_accounting.py::test_renyi_epsilon_is_that_of_the_paper",),
    ),
)

HOSTILE = group(
    "Hostile reviews",
    mutant(
        "a trained part in a new model",
        "a new model with a part that an earlier run trained counts as untouched",
        ("earlier.py", "(model, *model.parameters()) if id(one) in _runs)", "(model,) if id(one) in _runs)"),
        by=("hostile/test_promise_search.py::test_a_new_head_on_what_an_earlier_run_trained",),
    ),
    mutant(
        "deals not added up",
        "groups that were dealt anew after a lost secret are charged as if they were the first ones",
        ("ledger.py", 'charged.setdefault(r.get("deal"), {})', "charged.setdefault(None, {})"),
        by=("hostile/test_promise_ledger.py::test_groups_that_are_dealt_anew_after_a_lost_secret",),
    ),
    mutant(
        "a row that is there twice",
        "copies of a row are drawn and clipped each on its own",
        ("checks/repeats.py", "    if (most := int(counts.max())) > 1:\n", "    if (most := 0) > 1:\n"),
        by=("hostile/test_promise_nothing_beside.py::test_a_row_that_is_there_twice",),
    ),
    mutant(
        "a row that looks at another",
        "dataset[i] may depend on what was loaded before it",
        (
            "checks/rehearsal.py",
            "            if self._first is None:\n                self._check_order",
            "            if False:\n                self._check_order",
        ),
        by=("hostile/test_promise_nothing_beside.py::test_a_row_that_depends_on_the_one_before_it",),
    ),
    mutant(
        "writes where a step ends",
        "what the loop writes into the model after a step is not mentioned",
        ("step.py", "            self.writes.settle()\n", "            pass\n"),
        by=("hostile/test_promise_nothing_beside.py::test_examples_in_the_model_where_a_logical_batch_ends",),
    ),
    mutant(
        "parameters of a trial not compared",
        "the loop may write examples into parameters after run.step",
        ("checks/writes.py", "        self._compare_parameters()\n", ""),
        by=("hostile/test_promise_nothing_beside.py::test_a_clamp_of_the_weights_is_let_through",),
    ),
)

COMPILED = group(
    "Compiled models",
    mutant(
        "a gradient goes around the rules of a compiled graph",
        "the sink takes an ordinary gradient, and drops it",
        ("compiled/tracing.py", "            if g is not None:\n", "            if False:\n"),
        by=("compiled/test_compiled.py::test_parameter_that_goes_around_the_rules_is_refused",),
    ),
    mutant(
        "the order of picked rows is not looked at when a graph runs",
        "rows of one example count for another",
        ("compiled/graph.py", "        if broken:\n", "        if False:\n"),
        by=("compiled/test_compiled.py::test_rows_in_another_order_are_refused",),
    ),
    mutant(
        "a compiled model is not compared with the model as it is written",
        "a model that does something else when it is compiled is trained without a check",
        ("checks/rehearsal.py", "        if self._compiled and self._first is None:\n", "        if False:\n"),
        by=("compiled/test_compiled.py::test_a_model_that_is_another_when_it_is_compiled_is_refused",),
    ),
)

MUTANTS: tuple[Mutant, ...] = (
    *NOISE,
    *CLIPPING,
    *SAMPLING,
    *PRIVATE,
    *ACCOUNTING,
    *METHOD,
    *RANKS,
    *CORRELATED,
    *UNITS,
    *TUNING,
    *HOSTILE,
    *COMPILED,
)
