"""One thread (the machine is shared, and small models gain nothing from more), the table of measured errors, shared fixtures."""

import gc

import pytest
import torch

import helpers

torch.set_num_threads(1)
pytest.register_assert_rewrite("faults")


def pytest_collection_finish() -> None:
    """What the test files imported stays for good: collections, and the ones that tests ask for, pass over it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    helpers.write_errors()


# ---------------------------------------------------------------------- for tests of the loop


@pytest.fixture
def nothing_left_behind():
    """No mode that watches operations is on after the test."""
    from toys import captures

    yield
    gc.collect()
    assert captures() == 0


# ---------------------------------------------------------------------- for exactness of layers


@pytest.fixture(params=["dense", "deferred"])
def storage(request, monkeypatch):
    """Exact parameters as small ones (gradients stored) and as large ones (operands kept until the norms are known)."""
    if request.param == "deferred":
        monkeypatch.setattr("rgp.slots.LARGEST_DENSE", 0)


@pytest.fixture(params=["carried", "left", "right", "paper", "exact", "carried, deferred head", "exact, deferred"])
def method(request, monkeypatch):
    """A method of `layers.METHODS`; deferred as in `storage`."""
    from layers import METHODS

    if "deferred" in request.param:
        monkeypatch.setattr("rgp.slots.LARGEST_DENSE", 0)
    return METHODS[request.param.split(",")[0]]


# ---------------------------------------------------------------------- for language models


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory):
    """A tiny BERT with random weights, and its tokenizer."""
    return _tiny(tmp_path_factory, "bert")


@pytest.fixture(scope="session")
def gpt2_folder(tmp_path_factory):
    return _tiny(tmp_path_factory, "gpt2")


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory):
    return _tiny(tmp_path_factory, "llama")


def _tiny(tmp_path_factory, kind: str) -> str:
    from tiny_language import save_tiny

    return str(save_tiny(tmp_path_factory.mktemp(kind), kind))
