"""One thread (the machine is shared, and small models gain nothing from more), and the table of measured errors."""

import torch

import helpers

torch.set_num_threads(1)


def pytest_sessionfinish() -> None:
    helpers.write_errors()
