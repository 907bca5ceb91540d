"""Models whose rows cannot be assigned to examples: the run goes on with one example at a time, and says so."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rgp

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

DATA = [(torch.randint(9, (5,), generator=torch.Generator().manual_seed(i)), i % 2) for i in range(40)]


class Reader(nn.Module):
    """Positions come first from the lookup on ("ids"), from the linear layer on ("states"), or nowhere ("no")."""

    def __init__(self, turned: str, mixing: bool = False) -> None:
        super().__init__()
        self.turned, self.mixing = turned, mixing
        self.words, self.middle, self.out = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, ids: Tensor) -> Tensor:
        first = self.turned != "no"
        x = self.words(ids.T) if self.turned == "ids" else self.words(ids)
        x = x.transpose(0, 1) if self.turned == "states" else x
        y = torch.tanh(self.middle(x))
        y = y - y.mean(1 if first else 0, keepdim=True) if self.mixing else y
        return self.out(y.mean(0 if first else 1))


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def start(model: nn.Module, method: rgp.Method, **options) -> rgp.Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"noise_multiplier": 1.0, "batch_size": 10, "steps": 4, "microbatch_size": 8, "seed": 3, **options}
    return rgp.privatize(model, optimizer, DATA, method=method, **options)


def train(turned: str, method: rgp.Method, **options) -> tuple[dict[str, Tensor], set[int], rgp.Run]:
    """The weights at the end, the sizes of the micro-batches, and the run."""
    torch.manual_seed(0)
    model, sizes = Reader(turned).double(), set()
    with start(model, method, **options) as run:
        for batch in run:
            if not run.rehearsing:
                sizes.add(len(batch[0]))
            run.step(loss_of(model, batch))
    return model.state_dict(), sizes, run


METHODS = {"dpsgd": rgp.DPSGD(), "rgp": rgp.RGP(rank=2)}


@pytest.mark.filterwarnings("ignore:Try method=")
@pytest.mark.parametrize("turned", ["ids", "states"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_positions_first_trains_as_examples_first(turned, method):
    """The same draws, noise and clipping: rows that are assigned to the wrong example would show in the weights."""
    expected, sizes, _ = train("no", method)
    assert max(sizes) > 1
    with pytest.warns(UserWarning, match=r"each example goes through the model alone.*slow.*fallback='error'"):
        found, sizes, run = train(turned, method)
    assert sizes == {1} and run.loading.microbatch_size == 1
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-12)


def test_it_is_said_once_and_survives_a_checkpoint(tmp_path):
    model = Reader("states")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = start(model, rgp.DPSGD(), steps=6)  # rehearsed before steps 0, 1 and 4
        for batch in run:
            if run.step(loss_of(model, batch)) and run.step_index == 5:
                break
        run.save(tmp_path / "half")
        run.close()
        again = Reader("states")
        with rgp.resume(tmp_path / "half", again, torch.optim.SGD(again.parameters(), lr=0.5), DATA) as resumed:
            assert resumed.loading.microbatch_size == 1
            for batch in resumed:
                resumed.step(loss_of(again, batch))
    assert len([w for w in caught if "goes through the model alone" in str(w.message)]) == 1


def run_through(model: nn.Module, run: rgp.Run) -> None:
    for batch in run:
        run.step(loss_of(model, batch))


def test_a_model_that_mixes_examples_as_well_is_refused():
    model = Reader("states", mixing=True)
    with start(model, rgp.DPSGD()) as run:
        with pytest.raises(rgp.UnsupportedError, match=r"mix examples: the gradient of 8 examples .*microbatch_size=1"):
            run_through(model, run)
        assert run.ledger.count == 0


def test_it_can_be_refused():
    model, reason = Reader("states"), r"'middle.weight'.*not the first dimension.*microbatch_size=1"
    with start(model, rgp.DPSGD(fallback="error")) as run, pytest.raises(rgp.UnsupportedError, match=reason):
        run_through(model, run)


def test_check_works_with_one_example_at_a_time_too():
    ids = torch.stack([x for x, _ in DATA[:3]])
    labels = torch.tensor([0, 1, 1])
    found = rgp.check(Reader("states"), (ids, labels), loss_of, method=rgp.DPSGD())
    assert found.ok and "one example at a time" in str(found) and "'middle.weight'" in found.alone
    assert rgp.check(Reader("no"), (ids, labels), loss_of, method=rgp.DPSGD()).alone == ""
    mixed = rgp.check(Reader("states", mixing=True), (ids, labels), loss_of, method=rgp.DPSGD())
    assert not mixed.ok
    with pytest.raises(rgp.UnsupportedError, match=r"'middle.weight'"):
        rgp.check(Reader("states"), (ids, labels), loss_of, method=rgp.DPSGD(fallback="error"))
