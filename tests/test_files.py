"""Files that are there completely or not at all."""

import os
import stat

import pytest

from rgp.files import bare_name, complete_folder, read_json_lines, write_atomically, write_file, write_json, write_text


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    write_text(path, "später\n", mode=0o600)
    assert path.read_bytes() == "später\n".encode() and mode_of(path) == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("shared", [False, True])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, shared):
    path = tmp_path / "a"
    write_file(path, b"old")

    def write(new):
        assert new.parent == tmp_path and new != path
        new.write_bytes(b"half of the n")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, write, shared=shared)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_processes_that_share_a_file_write_under_names_of_their_own(tmp_path, monkeypatch):
    names = []
    for process in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        write_atomically(tmp_path / "a", lambda new: (names.append(new.name), new.write_bytes(b"x")), shared=True)
    assert len(set(names)) == 2


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "model"
    for content in ("first", "second"):
        with complete_folder(path) as draft:
            (draft / content).write_text(content)
            assert not (path / content).exists()
    assert [p.name for p in path.iterdir()] == ["second"] and mode_of(path) == 0o755


def test_a_failure_leaves_the_old_folder_and_nothing_else(tmp_path):
    path = tmp_path / "model"
    with complete_folder(path) as draft:
        (draft / "first").write_text("all of it")

    def fail():
        with complete_folder(path) as draft:
            (draft / "second").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [p.name for p in path.iterdir()] == ["first"] and list(tmp_path.iterdir()) == [path]


def test_a_bare_name_says_nothing_about_the_machine(tmp_path):
    assert bare_name(str(tmp_path / "mine.csv")) == "mine.csv"
    assert bare_name("owner/name") == "owner/name"


def test_lines_that_a_crash_cut_short_are_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert read_json_lines(path) == []
    path.write_bytes(b'{"step": 1}\n{"step": 2\n[3]\n{"step": 4}\n{"step": 5, "text": "\xff')
    assert read_json_lines(path) == [{"step": 1}, {"step": 4}]
