"""The secret of a run stays in memory, or in its own file."""

import copy
import pickle

import pytest

import rgp
from rgp.streams import Streams


@pytest.mark.parametrize("how", [pickle.dumps, copy.deepcopy])
def test_streams_cannot_be_pickled(how):
    with pytest.raises(rgp.WrongUseError, match="secret"):
        how(Streams.from_system())


def test_the_id_of_a_run_says_nothing_of_its_secret():
    one, two = Streams.from_seed(1), Streams.from_seed(2)
    assert one.run_id != two.run_id and one.run_id == Streams.from_seed(1).run_id
    assert one.run_id not in one.secret.hex()
