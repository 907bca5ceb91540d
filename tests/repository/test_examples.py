"""Every example runs as it stands, in a process of its own.

The processes are forks of one that has imported the libraries already: imports were half of the time.
"""

import importlib.util
import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.py"))
NEEDS = {
    "causal_lm": "transformers",
    "bert": "transformers",
    "huggingface": "transformers",
    "trainer": "accelerate",
    "loop": "sklearn",
    "vision": "safetensors",
}
SLOW_TO_IMPORT = (
    "torch._dynamo",
    "dp_accounting.pld.privacy_loss_distribution",
    "safetensors.torch",
    "sklearn.datasets",
    "transformers.trainer",
    "transformers.models.bert.modeling_bert",
)
SERVER = """
import importlib, json, os, runpy, sys, traceback

for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
assert "rgp" not in sys.modules
print("ready", flush=True)
for line in sys.stdin:
    script, folder = json.loads(line)
    if (child := os.fork()) == 0:
        os.chdir(folder)
        os.dup2(os.open("stdout", os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT), 2)
        sys.argv, sys.path[0] = [script], os.path.dirname(script)
        code = 0
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as left:
            code = left.code
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def server():
    libraries = [name for name in SLOW_TO_IMPORT if importlib.util.find_spec(name.partition(".")[0])]
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, json.dumps(libraries)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # the models are small, and other tests run beside
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        start_new_session=True,  # with its forks it is a group, which can be ended together
    )
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, server, tmp_path):
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    server.stdin.write(json.dumps([str(path), str(tmp_path)]) + "\n")
    assert select.select([server.stdout], [], [], 300)[0], "the example does not end"
    code = int(server.stdout.readline())
    said = (tmp_path / "stdout").read_text()
    assert code == 0, (tmp_path / "stderr").read_text()
    for accuracy in re.findall(r"held-out accuracy ([\d.]+)", said):
        least = 0.6 if path.stem == "resnet18" else 0.8  # cut short, it comes to 0.77 to 0.87; guessing would give 0.1
        assert float(accuracy) > least, said  # it learns: the data are easy
    for after, before in re.findall(r"held-out perplexity ([\d.]+), ([\d.]+) before", said):
        assert float(after) < 3 < float(before), said  # the text itself has about 2
    if path.stem == "dcgan":
        inside, outside, *before = map(float, re.findall(r"-?\d\.\d\d", said)[:4])
        assert inside - outside > 0.4 > 4 * abs(before[0] - before[1]), said  # it draws where real images are bright
