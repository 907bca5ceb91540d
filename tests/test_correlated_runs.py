"""Correlated noise in whole runs: its covariance, its sensitivity, who takes part, what is charged, and crashes."""

import itertools
import json
import math
import sys
import warnings

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from torch import nn

import rgp
from rgp import accounting
from rgp.errors import LedgerError, WrongUseError
from rgp.ledger import Ledger
from rgp.mechanism import Mechanism, Worth, plan_mechanism
from rgp.observing import Observer
from rgp.optimizers import AdamCorrected
from rgp.workload import rates_of
from toys import examples, loss_of, toy

pytestmark = pytest.mark.filterwarnings("ignore:the examples that were looked at")


class Watch(Observer):
    """Every release in units of its sensitivity, its coordinates, and who was in it."""

    def __init__(self, run):
        self.run, self.releases, self.coordinates, self.members = run, [], [], []
        run.observe(self)

    def begin_pass(self, gradients):
        while len(self.members) <= self.run.step_index:
            self.members.append(set())

    def before_clipping(self, gradients, indices):
        assert not self.members[self.run.step_index] & set(indices)
        self.members[self.run.step_index] |= set(indices)

    def released(self, step, noisy):
        self.releases.append(noisy / self.run._step.bound.sensitivity)
        self.coordinates.append(self.run.releases._coordinates)


class Drawn:
    """A noise source that remembers what it drew."""

    def __init__(self, source):
        self._source, self.name, self.replayable = source, source.name, source.replayable
        self.drawn = {}

    def add(self, total, *, std, step, attempt):
        self._source.add(total, std=std, step=step, attempt=attempt)
        self.drawn[step, attempt] = total.clone()


def wide(layers=3, width=40):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).double()


def idle(model=None, *, steps=8, **options):
    """A run whose gradients are all zero: what it releases is noise."""
    model = wide() if model is None else model
    options = {"batch_size": 4, "noise_multiplier": 0.7, "clip": 0.3, "seed": 0, "probe": False, **options}
    data = [torch.ones(model[0].in_features).double() * i for i in range(40)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with rgp.privatize(model, optimizer, data, steps=steps, **options) as run:
        watch = Watch(run)
        run.releases.source = Drawn(run.releases.source)
        for x in run:
            run.step((model(x) * 0).sum(1).mean())
    return run, watch


def released(run, watch):
    """(T, D): the columns of parameters."""
    columns = np.concatenate([np.arange(c.start, c.stop) for c in run._step.gradients.where.values()])
    return torch.stack(watch.releases).numpy()[:, columns]


def toeplitz(c, steps):
    return sum(np.diag(np.full(steps - k, c[k]), -k) for k in range(min(len(c), steps)))


def is_white(rows, sigma):
    """Whether rows (T, D) are independent noise of this deviation, by all products of two rows: five standard errors."""
    found = rows @ rows.T / rows.shape[1] / sigma**2
    return bool(np.abs(found - np.eye(len(rows))).max() < 5 * math.sqrt(2 / rows.shape[1]))


# ---------------------------------------------------------------------- the noise


@pytest.mark.parametrize("clip", [0.3, rgp.AdaptiveClip(0.3), rgp.AutoClip(0.3), rgp.GroupClip({"0*": 0.1, "*": 0.2})])
def test_the_noise_of_a_run_is_that_of_the_matrix_mechanism(clip):
    run, watch = idle(method=rgp.DPSGD(), bands=4, clip=clip)
    noise = released(run, watch)
    c = np.array(run.mechanism.coefficients)
    assert len(c) == 4
    assert is_white(toeplitz(c, 8) @ noise, 0.7)
    for factor in (2 / 3, 3 / 2):
        assert not is_white(toeplitz(c, 8) @ noise * factor, 0.7)
    assert not is_white(noise, 0.7), "independent noise is something else"
    for k in range(4):
        assert not is_white(toeplitz(np.where(np.arange(4) == k, 0, c), 8) @ noise, 0.7), f"c_{k} left out"
    independent = released(*idle(method=rgp.DPSGD(), bands=1))
    assert is_white(independent, 0.7)
    assert not is_white(toeplitz(c, 8) @ independent, 0.7)


def dense_moves(watch):
    """P from each step's coordinates to the next one's as a matrix, from J and J^T of docs/correlated-noise.md, written out."""

    def spread(frame):
        L, R = frame.Lt.T.numpy(), frame.R.numpy()
        p, r, d = len(L), len(R), R.shape[1]
        columns = []
        for i in range(r * (p + d)):
            unit = np.zeros(r * (p + d))
            unit[i] = 1
            A, dR = unit[: r * p].reshape(r, p).T, unit[r * p :].reshape(r, d)
            columns.append(((np.eye(p) - L @ L.T) @ A @ R + L @ dR).ravel())
        return np.array(columns).T

    moves = []
    for before, after in zip(watch.coordinates, watch.coordinates[1:], strict=False):
        (_, one), *_ = before.parts
        (_, other), *_ = after.parts
        same = torch.equal(one.Lt, other.Lt) and torch.equal(one.R, other.R)
        moves.append(np.eye(one.width) if same else spread(other).T @ spread(one))
    return moves


@pytest.fixture(scope="module")
def turning_run():
    """One carried matrix whose carriers turn every third step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 12, bias=False)).double()
    return idle(model, method=rgp.RGP(rank=6, source="weight", keep=3, overrides={"*": 6}), bands=4)


def whitened(watch, c, moves):
    width = moves[0].shape[0]
    w = [release.numpy()[:width] for release in watch.releases]
    rows = []
    for t in range(len(w)):
        total, back = c[0] * w[t], np.eye(width)
        for k in range(1, min(len(c), t + 1)):
            back = back @ moves[t - k]
            total = total + c[k] * back @ w[t - k]
        rows.append(total)
    return np.array(rows)


def test_past_noise_goes_along_when_carriers_turn(turning_run):
    """Whoever mixes the releases with the coefficients, in the coordinates of each step, finds fresh noise and nothing else."""
    run, watch = turning_run
    c, moves = run.mechanism.coefficients, dense_moves(watch)
    turned = [t for t, move in enumerate(moves) if not np.array_equal(move, np.eye(len(move)))]
    assert turned == [2, 5]
    fresh = np.array([run.releases.source.drawn[t, 0].numpy()[: len(moves[0])] for t in range(8)])
    np.testing.assert_allclose(whitened(watch, c, moves), fresh, atol=1e-8)
    stayed = [np.eye(len(m)) for m in moves]
    forgot = [0 * m if t in turned else m for t, m in enumerate(moves)]
    for wrong in (stayed, forgot):
        assert np.abs(whitened(watch, c, wrong) - fresh).max() > 0.1


def test_one_participation_moves_the_whitened_rows_by_at_most_one(turning_run):
    """For random parts of an example and for the worst ones: P lengthens nothing, and the squares of c sum to 1."""
    run, watch = turning_run
    c = run.mechanism.coefficients
    steps = len(watch.coordinates)
    rng = np.random.default_rng(0)
    for s in range(steps):
        width = watch.releases[s].numel()

        def rows(g, s=s):
            """(b, D): what g at step s becomes in the rows that follow, by the engine's own P."""
            g, found = torch.from_numpy(g), []
            for k in range(min(len(c), steps - s)):
                if k:
                    g = watch.coordinates[s + k - 1].turned_into(watch.coordinates[s + k])(g.clone())
                found.append(c[k] * g.numpy())
            return np.concatenate(found)

        matrix = np.stack([rows(unit) for unit in np.eye(width)], 1)
        largest = np.linalg.svd(matrix, compute_uv=False)[0]
        assert largest <= 1 + 1e-6
        g = rng.standard_normal(width)
        assert np.linalg.norm(rows(g)) <= np.linalg.norm(g) * (1 + 1e-6)
        if s + len(c) <= steps:
            assert largest >= 1 - 1e-6, "the bound is reached where carriers hold it"


def test_secure_noise_is_correlated_too():
    pytest.importorskip("randomgen")
    run, watch = idle(method=rgp.DPSGD(), bands=3, secure_noise=True)
    noise = torch.stack(watch.releases).numpy()[:, : 3 * 40 * 40]
    assert is_white(toeplitz(run.mechanism.coefficients, 8) @ noise, 0.7)
    assert not is_white(noise, 0.7)


@pytest.mark.parametrize("measured_at", [0, 7])
def test_adam_is_told_the_noise_of_a_single_step(measured_at):
    model = wide()
    optimizer = AdamCorrected(model.parameters(), lr=0.0)
    data = [torch.ones(40).double() for _ in range(40)]
    options = {"method": rgp.DPSGD(), "batch_size": 4, "noise_multiplier": 0.7, "clip": 0.3, "seed": 0, "probe": False}
    told = []
    with rgp.privatize(model, optimizer, data, steps=8, bands=4, **options) as run:
        watch = Watch(run)
        optimizer.register_step_pre_hook(lambda *_: told.append(optimizer.noise(model[0].weight)))
        for x in run:
            run.step((model(x) * 0).sum(1).mean())
    true = float(watch.releases[measured_at][: 3 * 1600].square().mean()) * (0.3 / 4) ** 2
    assert told[measured_at] == pytest.approx(true, rel=0.12)
    assert told[measured_at] != pytest.approx((0.7 * 0.3 / 4) ** 2, rel=0.12), "of fresh noise alone"


# ---------------------------------------------------------------------- who takes part


def trained(steps=12, model=None, data=None, **options):
    model = toy() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = {"noise_multiplier": 1.0, "seed": 0, "probe": False, "microbatch_size": 4, **options}
    return rgp.privatize(model, optimizer, data or examples(24), batch_size=4, steps=steps, **options)


def loop(run, *, until=None, save=None, every=3):
    for batch in run:
        if run.step(loss_of(run.model, batch)) and save and run.step_index % every == 0:
            run.save(save)
        if run.step_index == until:
            return


def test_nobody_takes_part_twice_in_b_steps_and_everybody_at_the_rate_that_is_charged():
    b, steps, data = 4, 120, examples(24)
    with trained(steps, data=data, method=rgp.LinearProbe(), bands=b) as run:
        watch = Watch(run)
        loop(run)
        when = [[t for t, members in enumerate(watch.members) if i in members] for i in range(24)]
        for times in when:
            assert len({t % b for t in times}) <= 1
            assert all(after - before >= b for before, after in itertools.pairwise(times))
        rate = run.mechanism.rate(0)
        assert rate == b * 4 / 24
        drawn, chances = sum(map(len, when)), 24 * steps / b
        error = 5 * math.sqrt(chances * rate * (1 - rate))
        assert abs(drawn - chances * rate) < error
        assert abs(drawn - chances * rate / b) > error, "the ordinary rate is another one"
        assert [r["group"] for r in run.ledger.records] == [t % b for t in range(steps)]
        assert {r["q"] for r in run.ledger.records} == {rate}


# ---------------------------------------------------------------------- what it costs


def independent_epsilon(rate, sigma, count, delta):
    accountant = PLDAccountant()
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma)), count)
    return accountant.get_epsilon(delta)


@pytest.mark.parametrize(
    ("size", "batch", "steps", "b", "sigma"),
    [
        (1000, 10, 50, 1, 1.0),
        (1000, 10, 50, 2, 1.0),
        (1000, 10, 50, 7, 0.8),
        (1000, 10, 50, 50, 0.8),
        (640, 64, 33, 10, 1.5),
        (640, 64, 30, 10, 1.5),
        (62349, 512, 60, 8, 0.5338),
        (62349, 512, 60, 60, 0.5442),
        (500, 100, 12, 5, 2.0),
        (500, 100, 13, 5, 2.0),
    ],
)
def test_epsilon_is_that_of_ceil_T_over_b_draws_at_b_times_the_rate(size, batch, steps, b, sigma):
    mechanism = plan_mechanism(
        size=size, method="x", batch_size=batch, steps=steps, noise_multiplier=sigma, bands=b, delta=1e-5
    )
    ledger = Ledger(mechanism.header())
    for t in range(steps):
        ledger.append(step=t, attempt=0, digest=None, **mechanism.charge(t))
    expected = independent_epsilon(min(1.0, b * batch / size), sigma, math.ceil(steps / b), 1e-5)
    for events in (ledger.events(), mechanism.events()):
        assert accounting.epsilon(events, delta=1e-5) == pytest.approx(expected, rel=2e-3)


def test_a_budget_is_calibrated_for_the_draws_of_one_group():
    plan = {"size": 62349, "method": "x", "batch_size": 512, "steps": 60, "budget": rgp.Budget(8.0, 1e-5)}
    found = {b: plan_mechanism(**plan, bands=b).sigmas[0] for b in (1, 8, 60)}
    assert found == {1: 0.4307, 8: 0.5338, 60: 0.5442}


def test_auto_takes_the_best_number_and_says_what_it_is_worth():
    plan = {"size": 62349, "method": "x", "batch_size": 512, "steps": 60, "budget": rgp.Budget(8.0, 1e-5)}
    mechanism = plan_mechanism(**plan, bands="auto")
    assert (mechanism.bands, mechanism.sigmas[0]) == (60, 0.5442)
    assert mechanism.worth.in_weights == pytest.approx(2.02, abs=0.02)
    assert mechanism.worth.of_a_step == pytest.approx(2.04, abs=0.02)
    assert Mechanism.from_json(json.loads(json.dumps(mechanism.to_json()))) == mechanism
    assert "noise in the weights 2.0 times smaller" in mechanism.noise_words()
    digits = plan_mechanism(
        size=1437, method="x", batch_size=256, steps=112, budget=rgp.Budget(3.0, 1e-5), bands="auto"
    )
    assert (digits.bands, digits.worth, digits.noise_words()) == (1, None, "independent noise")


def charged(mechanism, charges):
    ledger = Ledger(mechanism.header())
    for attempt, step in enumerate(charges):
        ledger.append(step=step, attempt=attempt, digest=None, **mechanism.charge(step))
    return ledger


def counts(ledger, group=None):
    return [event.count for event in ledger.events(group)]


def test_a_release_is_charged_to_its_group_and_the_largest_counts():
    mechanism = plan_mechanism(size=100, method="x", batch_size=10, steps=12, noise_multiplier=1.0, bands=4)
    assert counts(charged(mechanism, range(4))) == [1]
    assert counts(charged(mechanism, range(5))) == [2]
    ledger = charged(mechanism, [0, 1, 2, 2, 2, 6])
    assert (counts(ledger), counts(ledger, 2), counts(ledger, 1), counts(ledger, 3)) == ([4], [4], [1], [])
    torn = Ledger.from_text(ledger.text() + b'{"C": 1.0')
    assert (counts(torn), counts(torn, 2), counts(torn, 3)) == ([5], [5], [1]), "whose it was is unknown: everyone pays"
    old = plan_mechanism(size=100, method="x", batch_size=10, steps=12, noise_multiplier=1.0)
    assert counts(charged(old, range(12))) == [12]
    assert "group" not in old.charge(0)


def test_a_run_that_was_charged_twice_ends_within_its_budget(tmp_path):
    model = toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    budget = rgp.Budget(3.0, 1e-3)
    run = rgp.privatize(
        model, optimizer, examples(24), batch_size=4, steps=12, bands=3, budget=budget, seed=0, method=rgp.DPSGD()
    )
    for step in (0, 1, 2):
        run.ledger.append(step=step, attempt=7, digest=None, **run.mechanism.charge(step))
    with pytest.warns(UserWarning, match="charged twice"):
        loop(run)
    assert run.step_index == 9  # each group has one turn less, and not one step less in all
    assert run.epsilon() <= 3.0 < accounting.epsilon([*run.ledger.events(), run.mechanism.event(0)], delta=1e-3)
    run.close()


# ---------------------------------------------------------------------- crashes


METHODS = {
    "dpsgd": {"method": rgp.DPSGD()},
    "rgp": {"method": rgp.RGP(rank=2, keep=4)},
    "left": {"method": rgp.RGP(rank=2, keep=4, sides="left", source="weight"), "clip": rgp.AdaptiveClip(0.5)},
    "thin": {"method": rgp.RGP(rank=2, keep=4, state="thin")},
}


def weights(run):
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def resumed(folder, **options):
    model = toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return rgp.resume(folder, model, optimizer, examples(24), probe=False, **options)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("saved", "died"), [(3, 5), (4, 6), (6, 6)])
def test_a_killed_run_goes_on_to_the_bit_and_is_charged_nothing(tmp_path, name, saved, died):
    with trained(bands=3, **METHODS[name]) as run:
        loop(run)
        truth, spent = weights(run), run.epsilon()
    run = trained(bands=3, folder=tmp_path / "run", **METHODS[name])
    loop(run, until=died, save=tmp_path / "run", every=saved)
    run.ledger.close()  # as a process that is gone
    run = resumed(tmp_path / "run")
    assert run.step_index == saved
    assert run.releases.chain.length == 2
    loop(run)
    assert torch.equal(weights(run), truth)
    assert (run.ledger.count, run.epsilon()) == (12, spent)
    run.close()


def test_past_noise_is_a_secret_with_the_secrets_mode_and_life(tmp_path):
    folder = tmp_path / "run"
    run = trained(bands=3, folder=folder, method=rgp.DPSGD())
    loop(run, until=7, save=folder)
    (kept,) = folder.glob("past-noise*")
    assert kept.name == "past-noise.checkpoint-6"
    assert kept.stat().st_mode & 0o777 == 0o600 == (folder / "secret.json").stat().st_mode & 0o777
    inside = list((folder / "checkpoint-6").iterdir())
    past = run.past_noise()[1].numpy().tobytes()[:64]
    assert past in kept.read_bytes()
    assert not any(past in file.read_bytes() for file in inside)
    loop(run)
    run.save(folder)
    assert not list(folder.glob("past-noise*"))
    assert not (folder / "secret.json").exists()
    run.close()


def test_closing_a_finished_run_removes_past_noise(tmp_path):
    run = trained(bands=3, folder=tmp_path / "run", method=rgp.DPSGD())
    loop(run, save=tmp_path / "run", every=5)
    assert list((tmp_path / "run").glob("past-noise*"))
    run.close()
    assert not list((tmp_path / "run").glob("past-noise*"))


def test_a_crash_while_saving_leaves_the_old_past_noise(tmp_path, monkeypatch):
    """The file belongs to a checkpoint by its name: an unfinished save of another one changes nothing."""
    from rgp import checkpoint

    folder = tmp_path / "run"
    run = trained(bands=3, folder=folder, method=rgp.DPSGD())
    loop(run, until=3, save=folder)
    before = run.past_noise()[0].clone()
    loop(run, until=5)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_file", lambda path, *a, **k: full())
    with pytest.raises(OSError, match="No space"):
        run.save(folder)
    monkeypatch.undo()
    run.ledger.close()
    run = resumed(folder)
    assert run.step_index == 3
    assert torch.equal(run.past_noise()[0], before)
    run.close()


@pytest.mark.parametrize("lost", ["microbatch", "past noise", "secret"])
def test_what_cannot_be_computed_again_is_drawn_afresh_and_takes_nothing_back(tmp_path, lost):
    folder = tmp_path / "run"
    run = trained(bands=3, folder=folder, method=rgp.DPSGD())
    loop(run, until=5, save=folder)
    on_record = {(r["step"], r["attempt"]) for r in run.ledger.records}
    run.ledger.close()
    if lost == "past noise":
        (folder / "past-noise.checkpoint-3").unlink()
    if lost == "secret":
        (folder / "secret.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = resumed(folder, **({"microbatch_size": 1} if lost == "microbatch" else {}))
    source = run.releases.source = Drawn(run.releases.source)
    added, add = {}, run.releases._add_noise

    def noting(step, clipped):
        before = clipped.total.clone()
        noisy = add(step, clipped)
        added[step, run.releases.attempt] = (noisy - before) / clipped.sensitivity
        return noisy

    run.releases._add_noise = noting
    loop(run)
    c = run.mechanism.coefficients
    new = {(r["step"], r["attempt"]) for r in run.ledger.records} - on_record
    assert len(new) == run.ledger.count - 5 == 12 - 3
    assert new <= set(source.drawn), "each has fresh noise of its own"
    applied = dict(new)
    assert all(attempt >= 1 for step, attempt in new if step < 5)
    for step in (3, 4):
        z = source.drawn[step, applied[step]]
        torch.testing.assert_close(added[step, applied[step]], z / c[0], rtol=1e-12, atol=1e-12)
    w = {step: added[step, applied[step]] for step in applied}
    # the chain goes on from the second of them, and from nothing before it
    z = source.drawn[5, applied[5]]
    torch.testing.assert_close(w[5], (z - c[1] * w[4]) / c[0], rtol=1e-10, atol=1e-10)
    z = source.drawn[6, applied[6]]
    torch.testing.assert_close(w[6], (z - c[1] * w[5] - c[2] * w[4]) / c[0], rtol=1e-10, atol=1e-10)
    assert run.ledger.events()[0].count == 5  # three turns on record, the second one again, and one more
    run.close()


def test_secure_noise_forgets_when_it_is_resumed(tmp_path):
    pytest.importorskip("randomgen")
    folder = tmp_path / "run"
    run = trained(bands=3, folder=folder, method=rgp.DPSGD(), secure_noise=True)
    loop(run, until=3, save=folder)
    assert run.releases.chain.length == 2
    assert not list(folder.glob("past-noise*"))
    run.ledger.close()
    run = resumed(folder)
    assert run.releases.chain.length == 0
    loop(run)
    assert run.ledger.count == 12
    run.close()


def test_a_torn_line_may_be_the_next_step_so_that_one_takes_nothing_back(tmp_path):
    folder = tmp_path / "run"
    run = trained(bands=3, folder=folder, method=rgp.DPSGD())
    loop(run, until=5, save=folder)
    run.ledger.close()
    with open(folder / "ledger.jsonl", "ab") as file:
        file.write(b'{"C": 1.0, "att')
    with pytest.warns(UserWarning, match="torn"):
        run = resumed(folder)
    assert run.releases.chain.length == 2
    assert not run.ledger.drawn_before(4, 0)
    assert run.ledger.drawn_before(5, run.ledger.fresh_attempt(5))
    loop(run, until=6)
    assert run.releases.chain.length == 1, "the step that the torn line may stand for began a new chain"
    loop(run, until=7)
    assert run.releases.chain.length == 2
    assert run.ledger.count == 7 + 1
    run.close()
    # a copy of it is read in the same way, line by line
    again = Ledger.open(folder)
    assert [again.drawn_before(r["step"], r["attempt"]) for r in again.records if not r.get("torn")] == [
        False,
        False,
        False,
        False,
        False,
        True,
        False,
    ]


def test_a_release_that_could_not_be_recorded_leaves_nothing_to_take_back(monkeypatch):
    run = trained(bands=3, method=rgp.DPSGD())
    loop(run, until=4)
    append = run.ledger.append

    def fails(**record):
        monkeypatch.setattr(run.ledger, "append", append)
        raise LedgerError("the disk is full")

    monkeypatch.setattr(run.ledger, "append", fails)
    with pytest.raises(LedgerError):
        loop(run)
    assert run.releases.chain.length == 0
    loop(run)
    assert run.ledger.count == 12
    run.close()


def test_a_run_without_bands_keeps_nothing(tmp_path):
    run = trained(folder=tmp_path / "run", method=rgp.DPSGD())
    loop(run, until=4, save=tmp_path / "run")
    assert run.releases.chain.length == 0
    assert not list((tmp_path / "run").glob("past-noise*"))
    assert "bands" not in run.ledger.header
    run.close()


# ---------------------------------------------------------------------- what is given


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bands": 7}, "at most 6 bands"),
        ({"bands": 0}, "bands"),
        ({"bands": "many"}, "auto"),
        ({"bands": 3, "max_batch": 5}, "max_batch"),
        ({"bands": 3, "noise_multiplier": lambda t: 1.0}, "noise_multiplier is a schedule"),
        ({"bands": 13}, "12 steps"),
        ({"bands": "auto"}, "no budget"),
        ({"bands": 3, "method": rgp.RGP(rank=2, sides="alternate", keep=3)}, "alternate"),
    ],
)
def test_what_does_not_go_together_is_refused_with_a_reason(options, words):
    with pytest.raises(ValueError, match=words):
        trained(**{"method": rgp.DPSGD(), **options})


def test_batch_schedules_are_refused():
    sizes = {"size": 24, "batch_size": lambda t: 4 + t % 2, "steps": 4}
    with pytest.raises(ValueError, match="batch_size is a schedule"):
        plan_mechanism(**sizes, method="x", noise_multiplier=1.0, bands=2)


def test_carriers_that_turn_at_every_step_are_warned_of_and_auto_counts_with_them():
    with pytest.warns(UserWarning, match="keep=K"):
        trained(bands=3, method=rgp.RGP(rank=2)).close()
    budget = {
        "noise_multiplier": None,
        "budget": rgp.Budget(8.0, 1e-5),
        "data": examples(200),
        "steps": 20,
        "bands": "auto",
    }
    with trained(method=rgp.RGP(rank=2), **budget) as run:
        assert run.mechanism.bands == 1
    with trained(method=rgp.RGP(rank=2, keep=6), **budget) as run:
        assert 1 < run.mechanism.bands <= 6
    with trained(method=rgp.DPSGD(), **budget) as run:
        assert run.mechanism.bands > 6
        assert isinstance(run.mechanism.worth, Worth)


def test_schedules_that_are_known_beforehand_are_read_without_being_stepped():
    model = toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for scheduler in (
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / 10),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
    ):
        read = rates_of(optimizer, scheduler, 10)
        true = []
        for _ in range(10):
            true.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        assert read == pytest.approx(true)
        optimizer.param_groups[0]["lr"] = 0.5
    assert rates_of(optimizer, None, 10) is None
    assert rates_of(optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), 10) is None


def test_past_noise_cannot_be_pickled():
    import copy

    run = trained(bands=3, method=rgp.DPSGD())
    with pytest.raises(WrongUseError):
        copy.deepcopy(run.releases.chain)
    run.close()


def test_the_schedule_of_a_run_given_in_epochs_is_known_too(monkeypatch):
    asked = []
    monkeypatch.setattr(sys.modules["rgp.privatize"], "workload_of", lambda *given, **_: asked.append(given[-1]))
    model = toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"batch_size": 4, "noise_multiplier": 1.0, "bands": 3, "method": rgp.DPSGD()}
    rgp.privatize(model, optimizer, examples(24), epochs=2, **options).close()
    assert asked == [12]
