"""The ledger: durable before use, tamper-evident, and safe where something is lost."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import rgp
from rgp import accounting
from rgp import ledger as ledger_module
from rgp.errors import LedgerError, WrongUseError
from rgp.ledger import FILE, Ledger

WORST = {"q": 0.2, "sigma": 0.5, "C": 1.0, "batch_size": 8, "max_batch": None, "method": "dpsgd", "version": "0"}
HEADER = {"dataset_size": 40, "steps": 10, "delta": 1e-5, "worst": WORST}
LINE = {**WORST, "q": 0.1, "sigma": 1.0}


def filled(folder: Path | None, count: int = 4) -> Ledger:
    ledger = Ledger(HEADER, folder)
    for step in range(count):
        ledger.append(step=step, attempt=0, digest=f"d{step}", **LINE)
    return ledger


def lines(folder: Path) -> list[bytes]:
    return (folder / FILE).read_bytes().splitlines(keepends=True)


def rewrite(folder: Path, new: list[bytes]) -> None:
    (folder / FILE).write_bytes(b"".join(new))


def small_run(folder=None, *, steps=6, seed=0, **options) -> rgp.Run:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    data = [(torch.randn(3), i % 2) for i in range(40)]
    options = {"noise_multiplier": 1.0, **options}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return rgp.privatize(model, optimizer, data, batch_size=8, steps=steps, seed=seed, folder=folder, **options)


def train(run: rgp.Run, until: int | None = None) -> None:
    for x, y in run:
        if run.step(nn.functional.cross_entropy(run.model(x), y)) and run.step_index == until:
            break


# ---------------------------------------------------------------------- what is written


def test_lines_are_chained_json(tmp_path):
    ledger = filled(tmp_path)
    records = [json.loads(line) for line in lines(tmp_path)]
    assert [r["previous"] for r in records] == ["", *(r["hash"] for r in records[:-1])]
    assert records[-1]["hash"] == ledger.head and ledger.count == 4
    assert records[0]["dataset_size"] == 40 and records[2]["step"] == 1


def test_a_run_records_all_that_a_release_is(tmp_path):
    run = small_run(tmp_path, steps=3, clip=lambda t: 1.0 + t)
    train(run)
    for t, line in enumerate(lines(tmp_path)[1:]):
        record = json.loads(line)
        expected = {"step": t, "attempt": 0, "q": 0.2, "sigma": 1.0, "C": 1.0 + t, "batch_size": 8, "method": "rgp"}
        assert {k: record[k] for k in expected} == expected
        assert record["version"] == rgp.__version__ and len(record["digest"]) == 64 and len(record["hash"]) == 64


def test_reading_gives_the_same_ledger(tmp_path):
    ledger, again = filled(tmp_path), Ledger.open(tmp_path)
    assert (again.records, again.head, again.header) == (ledger.records, ledger.head, ledger.header)
    assert again.events() == ledger.events() == [accounting.Event(0.1, 1.0, 4)]


def test_epsilon_is_the_accountants_for_the_ledger(tmp_path):
    run = small_run(tmp_path, steps=4)
    train(run)
    expected = accounting.epsilon([accounting.Event(0.2, 1.0, 4)], delta=run.mechanism.delta)
    assert run.epsilon() == expected
    assert accounting.epsilon(Ledger.open(tmp_path).events(), delta=run.mechanism.delta) == expected


def test_in_memory_until_it_is_moved(tmp_path):
    ledger = filled(None, 3)
    assert ledger.path is None and ledger.count == 3
    ledger.move_to(tmp_path / "new")
    ledger.append(step=3, attempt=0, digest="d", **LINE)
    assert Ledger.open(tmp_path / "new").head == ledger.head


def test_a_folder_that_we_make_is_the_owners_alone(tmp_path):
    filled(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_a_folder_with_another_ledger_is_refused(tmp_path):
    filled(tmp_path).close()
    with pytest.raises(LedgerError, match=r"another run's releases are recorded there.*rgp\.resume"):
        Ledger(HEADER, tmp_path)
    with pytest.raises(LedgerError, match="another run's releases"):
        filled(None).move_to(tmp_path)


# ---------------------------------------------------------------------- damage


def test_every_edit_is_noticed(tmp_path):
    filled(tmp_path).close()
    whole = lines(tmp_path)
    for number, line in enumerate(whole):
        for key in json.loads(line):
            record = json.loads(line)
            record[key] = "other"
            rewrite(
                tmp_path, [*whole[:number], json.dumps(record, sort_keys=True).encode() + b"\n", *whole[number + 1 :]]
            )
            with pytest.raises(LedgerError, match=rf"line ({number + 1}|{number + 2})\b"):
                Ledger.open(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda w: [*w[:2], w[1], *w[2:]],  # repeated
        lambda w: [w[0], w[2], w[1], *w[3:]],  # swapped
        lambda w: [*w[:2], *w[3:]],  # removed
        lambda w: w[1:],  # without the first
        lambda w: [*w[:2], b"nonsense\n", *w[3:]],
        lambda w: [*w[:2], b"\n", *w[2:]],
        lambda w: [*w[:2], b'["not", "a", "record"]\n', *w[3:]],
    ],
)
def test_damage_inside_is_an_error(tmp_path, damage):
    filled(tmp_path).close()
    rewrite(tmp_path, damage(lines(tmp_path)))
    with pytest.raises(LedgerError, match="line"):
        Ledger.open(tmp_path)


def test_a_step_recorded_twice_with_a_valid_chain_is_an_error(tmp_path):
    ledger = filled(tmp_path)
    ledger.append(step=2, attempt=0, digest="d", **LINE)
    with pytest.raises(LedgerError, match="step 2, attempt 0 is recorded twice"):
        Ledger.open(tmp_path)


def test_a_second_attempt_at_a_step_is_another_release(tmp_path):
    ledger = filled(tmp_path)
    ledger.append(step=2, attempt=1, digest="d", **LINE)
    again = Ledger.open(tmp_path)
    assert again.count == 5 and [r["attempt"] for r in again.of_step(2)] == [0, 1]
    assert [r["attempt"] for r in again.of_step(2, since=4)] == [1]


def test_an_unknown_format_is_refused(tmp_path):
    record = {**HEADER, "ledger": 99, "previous": ""}
    record["hash"] = ledger_module._hash(record)
    rewrite(tmp_path, [ledger_module._line(record)])
    with pytest.raises(LedgerError, match="format 99"):
        Ledger.open(tmp_path)


def test_a_missing_file_is_explained(tmp_path):
    with pytest.raises(LedgerError, match="no record of what was released"):
        Ledger.open(tmp_path)


@pytest.mark.parametrize("content", [b"", b'{"ledger": 1, "da'])
def test_a_file_without_its_first_line_is_refused(tmp_path, content):
    rewrite(tmp_path, [content])
    with pytest.raises(LedgerError, match="no complete line"):
        Ledger.open(tmp_path)


# ---------------------------------------------------------------------- torn lines


@pytest.mark.parametrize("keep", [1, 50, -1])
def test_a_torn_last_line_counts_with_the_worst_charge(tmp_path, keep):
    filled(tmp_path).close()
    whole = lines(tmp_path)
    rewrite(tmp_path, [*whole[:-1], whole[-1][:keep]])
    before = (tmp_path / FILE).read_bytes()
    read = Ledger.open(tmp_path)
    assert read.count == 4 and "torn" in read.repaired
    assert set(read.events()) == {accounting.Event(0.1, 1.0, 3), accounting.Event(0.2, 0.5, 1)}
    assert (tmp_path / FILE).read_bytes() == before  # reading repairs nothing: a run may be writing that line just now
    mended = Ledger.open(tmp_path, append=True)
    assert (mended.events(), mended.head) == (read.events(), read.head)
    mended.close()
    after = Ledger.open(tmp_path)
    assert after.repaired is None and after.count == 4 and after.events() == read.events()


def test_a_last_line_of_which_a_page_was_lost_counts_too(tmp_path):
    filled(tmp_path).close()
    whole = lines(tmp_path)
    rewrite(tmp_path, [*whole[:-1], b"\0" * 100 + whole[-1][100:]])
    assert Ledger.open(tmp_path).count == 4


def test_no_noise_of_a_torn_line_is_drawn_again(tmp_path):
    """It is not known which step or attempt it was; new attempts stay above all that it can have been."""
    ledger = filled(tmp_path)
    ledger.append(step=1, attempt=1, digest="d", **LINE)
    ledger.close()
    with open(tmp_path / FILE, "ab") as file:
        file.write(b'{"C": 1.0, "atte')
    mended = Ledger.open(tmp_path, append=True)
    assert [mended.fresh_attempt(step) for step in (0, 1, 4, 9)] == [3, 3, 3, 3]
    mended.close()
    assert Ledger.open(tmp_path).fresh_attempt(4) == 3  # also for whoever opens it next
    assert filled(None).fresh_attempt(1) == 1 and filled(None).fresh_attempt(7) == 0


# ---------------------------------------------------------------------- rollback


def test_a_rolled_back_ledger_is_noticed(tmp_path):
    ledger = filled(tmp_path)
    known = [(0, ledger.header["hash"]), *((i + 1, r["hash"]) for i, r in enumerate(ledger.records))]
    ledger.close()
    whole = lines(tmp_path)
    for keep in range(1, 6):
        rewrite(tmp_path, whole[:keep])
        cut = Ledger.open(tmp_path)
        for count, head in known:
            if count < keep:
                cut.check_contains(count, head)
            else:
                with pytest.raises(LedgerError, match=f"the checkpoint knows {count} releases"):
                    cut.check_contains(count, head)


def test_another_runs_ledger_is_noticed(tmp_path):
    ledger, other = filled(None), Ledger({**HEADER, "steps": 11})
    for record in ledger.records:
        other.append(**{k: v for k, v in record.items() if k not in ("hash", "previous")})
    with pytest.raises(LedgerError, match="belongs to another run"):
        other.check_contains(ledger.count, ledger.head)
    with pytest.raises(LedgerError):
        other.check_contains(0, ledger.header["hash"])


# ---------------------------------------------------------------------- a disk that fails


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_leaves_the_release_unused(tmp_path, monkeypatch, call):
    run = small_run(tmp_path)
    train(run, until=2)
    before, head = run.model.weight.detach().clone(), run.ledger.head

    def full(handle, *line):
        if call == "write":
            os.pwrite(handle, line[0][:20], os.fstat(handle).st_size)  # part of the line gets through
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ledger_module.os, call, full)
        with pytest.raises(LedgerError, match=r"No space left on device.*it was not used"):
            train(run)
    assert torch.equal(run.model.weight, before) and run.step_index == 2
    assert (run.ledger.count, run.ledger.head) == (2, head)
    train(run)  # space was made: the run goes on as if nothing had been
    assert Ledger.open(tmp_path).count == 6
    undisturbed = small_run()
    train(undisturbed)
    assert torch.equal(run.model.weight, undisturbed.model.weight)


def test_lines_of_another_process_are_not_taken_for_leftovers(tmp_path):
    """Without file locks (some network disks) nothing else keeps two processes apart."""
    run = small_run(tmp_path)
    train(run, until=2)
    held = (tmp_path / FILE).read_bytes()
    with open(tmp_path / FILE, "ab") as file:
        file.write(held.splitlines(keepends=True)[-1])
    with pytest.raises(LedgerError, match="added to by someone else"):
        train(run, until=3)
    assert (tmp_path / FILE).read_bytes().startswith(held) and run.step_index == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("on_disk", [True, False], ids=["on disk", "in memory"])
def test_a_fork_of_the_process_cannot_release(tmp_path, on_disk):
    """It would draw the same noise for another sum, and the ledger would know of one of them."""
    run = small_run(tmp_path if on_disk else None)
    train(run, until=2)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            train(run, until=3)
            os.write(writer, b"went on")
        except LedgerError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"of which this one is a fork" in os.read(reader, 1000)
    train(run)
    assert run.step_index == run.ledger.count == 6


def test_going_on_in_the_same_loop_after_a_failure_is_refused(tmp_path, monkeypatch):
    run = small_run(tmp_path, microbatch_size=40, probe=False)

    def broken(_handle):
        raise OSError(errno.EIO, "I/O error")

    def swallow_and_go_on():
        for x, y in run:
            with pytest.raises(LedgerError):
                run.step(nn.functional.cross_entropy(run.model(x), y))

    monkeypatch.setattr(ledger_module.os, "fsync", broken)
    with pytest.raises(WrongUseError, match=r"run\.step failed for the last batch"):
        swallow_and_go_on()
    assert run.step_index == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_an_unwritable_folder_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(LedgerError, match="no ledger can be kept in"):
        filled(tmp_path / "run")


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(LedgerError, match="no ledger can be kept in"):
        filled(tmp_path / "file" / "run")


@pytest.mark.parametrize("harm", ["removed", "replaced", "cut"])
def test_a_file_that_changes_under_the_run_is_noticed(tmp_path, harm):
    ledger = filled(tmp_path)
    path = tmp_path / FILE
    if harm == "removed":
        path.unlink()
    elif harm == "replaced":
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
    else:
        os.truncate(path, 300)
    with pytest.raises(LedgerError, match="removed, replaced or cut"):
        ledger.append(step=4, attempt=0, digest="d", **LINE)


def test_lines_are_synced_before_the_optimizer_steps(tmp_path, monkeypatch):
    run = small_run(tmp_path, steps=2)
    events = []
    fsync, step = os.fsync, run.optimizer.step
    monkeypatch.setattr(ledger_module.os, "fsync", lambda handle: events.append("sync") or fsync(handle))
    monkeypatch.setattr(run.optimizer, "step", lambda *a: events.append("optimizer") or step(*a))
    train(run)
    assert events == ["sync", "optimizer"] * 2


# ---------------------------------------------------------------------- one at a time


def test_another_process_cannot_append(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_module, "PATIENCE", 0.3)
    ledger = filled(tmp_path)
    code = (
        "import sys; from rgp import ledger; ledger.PATIENCE = 0.3\n"
        "try: ledger.Ledger.open(sys.argv[1], append=True)\n"
        "except ledger.LedgerError as e: print(e)\n"
        "print(ledger.Ledger.open(sys.argv[1]).count)"
    )
    out = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True).stdout
    assert "another process is appending" in out and out.endswith("4\n")  # reading is always possible
    ledger.append(step=4, attempt=0, digest="d", **LINE)


def test_in_one_process_the_later_takes_over(tmp_path):
    first = filled(tmp_path)
    second = Ledger.open(tmp_path, append=True)
    with pytest.raises(LedgerError, match="resumed after this one"):
        first.append(step=4, attempt=0, digest="d", **LINE)
    second.append(step=4, attempt=0, digest="d", **LINE)
    assert Ledger.open(tmp_path).count == 5


def test_a_ledger_opened_for_reading_takes_no_lines(tmp_path):
    filled(tmp_path)
    with pytest.raises(LedgerError, match="opened for reading"):
        Ledger.open(tmp_path).append(step=4, attempt=0, digest="d", **LINE)


def test_long_ledgers_are_read_in_linear_time(tmp_path):
    """20,000 lines, as a long run has: looking a step up must not go through all of them."""
    ledger = Ledger(HEADER)
    for step in range(20_000):
        ledger.append(step=step, attempt=0, digest=None, **LINE)
        ledger.of_step(step)
        ledger.fresh_attempt(step)
    ledger.move_to(tmp_path)
    assert Ledger.open(tmp_path).events() == [accounting.Event(0.1, 1.0, 20_000)]
