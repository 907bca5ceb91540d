"""The command line as a user types it: `rgp(line)` runs it, `ask(line)` reads its JSON."""

import json

import pytest
from typer.testing import CliRunner

from rgp import cli


def rgp(line):
    return CliRunner().invoke(cli.app, line.split())


def ask(line):
    result = rgp(line + " --json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
