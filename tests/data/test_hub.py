"""The real packages `datasets` and `huggingface_hub` against a hub on this machine: as many of its answers as they ask for.

Each client runs in a process of its own, because the hub's address is read when those packages are imported.
"""

import csv
import hashlib
import io
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlparse

import numpy as np
import pytest

pytest.importorskip("datasets", reason="the package datasets is not installed: pip install 'rgp[data]'")
pytest.importorskip("huggingface_hub", reason="the package huggingface_hub is not installed: pip install 'rgp[data]'")

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """`files`: "datasets/owner/name" or "models/owner/name" -> path -> content."""

    files: dict

    def do_GET(self):
        self.answer(urlparse(self.path).path, body=True)

    def do_HEAD(self):
        self.answer(urlparse(self.path).path, body=False)

    def do_POST(self):
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.answer(urlparse(self.path).path, body=True, paths=form.get("paths", []))

    def answer(self, path, *, body, paths=()):
        words = unquote(path).strip("/").split("/")
        api = words[0] == "api"
        words = words[api:]
        if words[0] != "datasets" and not api:
            words = ["models", *words]
        kind, repo, rest = words[0], "/".join(words[:3]), words[3:]
        files = self.files.get(repo)
        if kind not in ("datasets", "models") or files is None:
            return self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
        if not api:  # /datasets/owner/name/resolve/REVISION/PATH
            found = files.get("/".join(rest[2:]))
            if found is None:
                return self.send(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
            headers = {"ETag": f'"{hashlib.sha256(found).hexdigest()}"', "X-Repo-Commit": COMMIT}
            return self.send(200, found, headers, body)
        listed = [
            {"type": "file", "path": name, "oid": hashlib.sha1(content).hexdigest(), "size": len(content)}
            for name, content in files.items()
        ]
        if rest[:1] == ["tree"]:
            below = "/".join(rest[2:])
            return self.json([row for row in listed if row["path"].rpartition("/")[0] == below], body)
        if rest[:1] == ["paths-info"]:
            return self.json([row for row in listed if row["path"] in paths], body)
        about = {"id": "/".join(words[1:3]), "sha": COMMIT, "private": False, "tags": [], "downloads": 0}
        return self.json({**about, "siblings": [{"rfilename": name} for name in files]}, body)

    def json(self, content, body):
        self.send(200, json.dumps(content).encode(), {"Content-Type": "application/json"}, body)

    def send(self, code, content, headers, body):
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_):
        if os.environ.get("HUB_LOG"):
            print(self.command, self.path, file=sys.stderr)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """Runs Python in a process that asks this hub."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("TheHub", (Hub,), {"files": make_files()}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    home = tmp_path_factory.mktemp("home")

    def run(*command):
        environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(home)}
        environment |= {"HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            environment.pop(name, None)
        return subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120, cwd=home
        )

    yield run
    server.shutdown()
    server.server_close()


def make_files():
    rows = [(f"film {i} was {'good' if i % 2 else 'bad'}", i % 2) for i in range(20)]
    table = io.StringIO()
    csv.writer(table).writerows([("sentence", "label"), *rows])
    glue = {f"sst2/{split}.csv": table.getvalue().encode() for split in ("train", "validation")}
    card = "---\nconfigs:\n- config_name: sst2\n  data_files:\n  - {split: train, path: sst2/train.csv}\n"
    glue["README.md"] = f"{card}  - {{split: validation, path: sst2/validation.csv}}\n---\n".encode()
    table = io.StringIO()
    csv.writer(table).writerows(
        [("sentence", "label", "author"), *((t, y, f"a{i % 10}") for i, (t, y) in enumerate(rows))]
    )
    talk = {"train.csv": table.getvalue().encode(), "test.csv": table.getvalue().encode()}
    return {
        "datasets/nyu-mll/glue": glue,
        "datasets/who/pets": {"train.parquet": pictures()},
        "datasets/who/owned": {"train.parquet": pictures(owner=[0, 1, 2, 3, 4] * 2)},
        "datasets/who/talk": talk,
        "datasets/who/notes": {"train.csv": talk["train.csv"]},
    }


def pictures(**more):
    """As the hub keeps images: a Parquet file with PNG bytes, and the columns' kinds in its metadata."""
    import datasets
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (10, 8, 8, 3), dtype=np.uint8)
    kinds = {"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    features = datasets.Features({**kinds, **{name: datasets.Value("int64") for name in more}})
    rows = {
        "img": [Image.fromarray(x) for x in pixels],
        "label": [i % 2 for i in range(10)],
        **more,
    }
    file = io.BytesIO()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(file)
    return file.getvalue()


READ = """
import json, sys
from rgp.data import DataSpec, load

class Words:
    pad_token_id, padding_side, name_or_path = 0, "right", "words"
    def __call__(self, texts, truncation, max_length):
        return {"input_ids": [[len(w) for w in text.split()] for text in texts]}

texts = load(DataSpec(name="hf:nyu-mll/glue:sst2", tokenizer=Words()))
pets = load(DataSpec(name="who/pets"))
print(json.dumps({
    "texts": [len(texts.train), len(texts.test), texts.published_test, list(texts.label_names)],
    "ids": texts.train[1]["input_ids"].tolist(),
    "label": int(texts.train[1]["labels"]),
    "pets": [len(pets.train), len(pets.test), pets.published_test, list(pets.label_names), list(pets.shape)],
    "low, high": [min(float(x.min()) for x, _ in pets.train), max(float(x.max()) for x, _ in pets.train)],
}))
"""


def test_datasets_of_the_hub_by_name(client):
    done = client("-c", READ)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["texts"] == [20, 20, True, ["0", "1"]] and got["ids"] == [4, 1, 3, 4] and got["label"] == 1
    assert got["pets"] == [8, 2, False, ["cat", "dog"], [3, 8, 8]]
    assert -1 <= got["low, high"][0] < -0.9 and 0.9 < got["low, high"][1] <= 1


PERSONS = """
import json
from rgp.data import DataError, DataSpec, load

class Words:
    pad_token_id, padding_side, name_or_path = 0, "right", "words"
    def __call__(self, texts, truncation, max_length):
        return {"input_ids": [[len(w) for w in text.split()] for text in texts]}

def told(name, column, **more):
    data = load(DataSpec(name=name, units=column, rows_per_unit=3, tokenizer=Words(), **more))
    rows = [len(data.train), len(data.test)]
    return [rows, data.members.rows, data.units, data.test_members.unit.size, data.members.unit.describe(), data.description]

try:
    load(DataSpec(name="who/talk", units="user", tokenizer=Words()))
except DataError as error:
    wrong = str(error)
print(json.dumps([told("who/talk", "author"), told("hf:who/notes", "author"), told("who/owned", "owner", seed=1), wrong]))
"""


def test_persons_of_the_hubs_datasets(client):
    """A column says whose a row is: of texts with and without a test split, and of pictures."""
    done = client("-c", PERSONS)
    assert done.returncode == 0, done.stderr
    split, held_out, pets, wrong = json.loads(done.stdout.splitlines()[-1])
    assert split[:4] == [[20, 20], 20, 10, 10]
    for (train, test), rows, persons, others, *_ in (held_out, pets):
        assert train == rows == 2 * persons and test == 2 * others  # whoever is held out is so with all their rows
    assert held_out[2] + held_out[3] == 10 and pets[2] + pets[3] == 5
    assert split[4] == "one person (column author), at most 3 rows in a step" and "column owner" in pets[4]
    for (train, test), *_, description in (split, held_out, pets):
        assert str(train) not in description and str(test) not in description  # how many rows there are is private
    assert "no column 'user'; its columns are sentence, label, author" in wrong


def test_data_get_from_the_hub(client, tmp_path):
    done = client("-m", "rgp", "data", "get", "sst2", "svhn", "--to", str(tmp_path))
    assert done.returncode == 2 and "train_32x32.mat" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert done.stdout.strip() == str(tmp_path / "sst2"), "the hub has the first, and not the second"
    rows = [json.loads(line) for line in (tmp_path / "sst2" / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 20 and rows[0] == {"sentence": "film 0 was bad", "label": 0}
