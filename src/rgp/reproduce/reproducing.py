"""One call of `rgp reproduce`: which cells, run or checked, and what is written about them."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rgp.files import write_text
from rgp.reproduce import claims, content, markdown, page
from rgp.reproduce.checking import StandIns
from rgp.reproduce.items import SCALES, Cell, Item, files, read
from rgp.reproduce.numbers import Numbers
from rgp.reproduce.running import Work, unavailable
from rgp.reproduce.store import Store
from rgp.train.progress import Progress

TITLE = "The paper's tables and figures, again"


class Reproduction:
    def __init__(
        self,
        what: Sequence[str],
        *,
        scale: str,
        seeds: int | None,
        only: Sequence[str],
        data: Path | None,
        out: Path,
        results: Path | None,
        shares: Iterable[Path] | None,
        changes: Sequence[str],
        progress: Progress,
    ) -> None:
        if scale not in SCALES:
            raise ValueError(f"--scale {scale} must be {' or '.join(SCALES)}")
        if seeds is not None and seeds < 1:
            raise ValueError(f"--seeds {seeds} must be 1 or more")
        self.scale, self.out, self.data, self.progress = scale, out, data, progress
        self.only = [word.lower() for word in only]
        self.listing = [word.lower() for word in what] == ["list"]
        self._seeds, self._changes = seeds, _parsed(changes)
        self.items = [self._item(name, scale) for name in self._names(what)]
        self.store = Store(results or out / "results.jsonl", results_of_others() if shares is None else shares)
        for words in self.store.left_out:
            progress.say(f"rgp: not used: {' '.join(words.split())}")
        self.problems: dict[str, str] = {}
        if self.only and not self.listing and not any(self.chosen(item) for item in self.items):
            names = [cell.name for item in self.items for cell in item.cells][:6]
            raise ValueError(
                f"--only {', '.join(only)}: no cell has that in its name; names are like {', '.join(names)}"
            )

    def _names(self, what: Sequence[str]) -> list[str]:
        known = files()
        wanted = [word.lower() for word in what]
        if wanted in (["list"], ["all"]):
            return list(known)
        strange = [word for word in wanted if word not in known]
        if strange:
            raise ValueError(f"there is no {', '.join(strange)} to reproduce; there are {', '.join(known)}; all; list")
        return list(dict.fromkeys(wanted))

    def _item(self, name: str, scale: str) -> Item:
        return read(files()[name], scale, seeds=self._seeds, changes=self._changes)

    def chosen(self, item: Item) -> list[Cell]:
        return [c for c in item.cells if not self.only or any(word in c.name.lower() for word in self.only)]

    # ------------------------------------------------------------------ what can be done

    def overview(self) -> dict[str, Any]:
        rows = [{"name": i.name, "title": i.title, **self._counted(self.chosen(i))} for i in self.items]
        total = self._counted([cell for item in self.items for cell in self.chosen(item)])
        return {"scale": self.scale, "list": rows, "all": total}

    def _counted(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """Different runs: tables and figures have many in common."""
        runs = {(cell.key, cell.record): cell for cell in cells}
        left = [cell.column.minutes for cell in runs.values() if self.store.get(cell) is None]
        known = [value for value in left if value is not None]
        return {
            "runs": len(runs),
            "finished": len(runs) - len(left),
            "minutes_left": round(sum(known), 1) if len(known) == len(left) else None,
        }

    def run(self, *, resume: bool, minutes: float | None) -> dict[str, Any]:
        if minutes is not None and minutes < 0:
            raise ValueError(f"--minutes {minutes:g} must be 0 or more")
        self.out.mkdir(parents=True, exist_ok=True)
        work = Work(
            store=self.store,
            out=self.out,
            progress=self.progress,
            data=self.data,
            resume=resume,
            deadline=None if minutes is None else time.monotonic() + 60 * minutes,
        )
        try:
            self.problems = work.run([cell for item in self.items for cell in self.chosen(item)])
        except BaseException:
            self.write(None)  # what there is
            raise
        return self.result()

    def check(self) -> dict[str, Any]:
        """A few steps of every different run, seed 0. What started once is not started again."""
        cells = {c.key: c for item in self.items for c in self.chosen(item) if c.seed == 0 and c.measure != "cost"}
        rows = []
        self.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="rgp-stand-ins-") as folder:
            stand_ins = StandIns(Path(folder))
            for number, cell in enumerate(cells.values(), 1):
                known = self.store.get(cell, "check")
                if known is None or not known["ok"]:
                    self.progress.say(f"{cell.name} ({number} of {len(cells)})")
                    known = self.store.add(cell, "check", self._check(cell, stand_ins))
                rows.append({"name": cell.name, **known})
        failed = [row["name"] for row in rows if not row["ok"]]
        return {"scale": self.scale, "checked": rows, "started": len(rows) - len(failed), "failed": failed}

    def _check(self, cell: Cell, stand_ins: StandIns) -> dict[str, Any]:
        try:
            return {"ok": True, **stand_ins.check(cell.settings(self.data))}
        except Exception as error:
            return {"ok": False, "error": " ".join(str(error).split()) or type(error).__name__}

    # ------------------------------------------------------------------ what came out

    def numbers(self, items: Sequence[Item]) -> list[Numbers]:
        why = dict(self.problems)
        for item in items:
            for cell in item.cells:
                if cell.name not in why and self.store.get(cell) is None:
                    reason = unavailable(cell, self.data)
                    if reason is not None:
                        why[cell.name] = reason
        return [Numbers(item, self.store, why) for item in items]

    def result(self) -> dict[str, Any]:
        found = self.numbers(self.items)
        return {
            "scale": self.scale,
            "items": [numbers.as_json() for numbers in found],
            "claims": [verdict.as_json() for verdict in claims.check({n.item.name: n for n in found})],
            "problems": self.problems,
            "failed": [name for name, why in self.problems.items() if why.startswith("failed")],
        }

    def write(self, markdown_page: Path | None) -> list[str]:
        """SCALE.json and SCALE.html in the folder, and the Markdown page if asked for. Returns their paths."""
        found = self.numbers(self.items)
        verdicts = claims.check({n.item.name: n for n in found})
        sections = content.sections(found, verdicts, self._paper())
        words = [
            f"Written by `rgp reproduce {' '.join(n.item.name for n in found) if len(found) < len(files()) else 'all'} "
            f"--scale {self.scale}` from the runs that were finished by then; nothing here is written by hand.",
            "Numbering is the paper's (Yu, Zhang, Chen, Yin, Liu, ICML 2021); its figure 1 is a drawing. Only the text of the "
            "paper was at hand, without pictures: of its figures, what its tables and sentences say is set beside ours.",
        ]
        if self._changes:
            words.append(f"A trial: all runs with {', '.join(f'`{k} = {v}`' for k, v in self._changes.items())}.")
        written = [self.out / f"{self.scale}.json", self.out / f"{self.scale}.html"]
        write_text(written[0], json.dumps(self.result(), indent=1, allow_nan=False) + "\n")
        write_text(written[1], page.page(sections, title=TITLE, words=words))
        if markdown_page is not None:
            written += markdown.write(sections, markdown_page, title=TITLE, words=words, say=self.progress.say)
        return [str(path) for path in written]

    def _paper(self) -> list[content.Section]:
        """What is known of the paper scale, if any of it was checked."""
        items = [read(files()[item.name], "paper", seeds=1, changes=self._changes) for item in self.items]
        checks = {cell.key: self.store.get(cell, "check") for item in items for cell in item.cells}
        if not any(checks.values()):
            return []
        why = {}
        for item in items:
            for cell in item.cells:
                reason = unavailable(cell, self.data)
                if reason is not None:
                    why[cell.name] = reason
        return [content.starts([Numbers(item, self.store, why) for item in items], checks, why)]


def results_of_others() -> list[Path]:
    """What the scripts in experiments/ have measured, in a checkout."""
    folder = Path(__file__).resolve().parents[3] / "experiments" / "results"
    return sorted(folder.glob("*.jsonl")) if folder.is_dir() else []


def _parsed(changes: Sequence[str]) -> dict[str, Any]:
    import yaml

    made = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"--set {change}: write section.key=value, such as --set training.steps=4")
        made[name.strip()] = yaml.safe_load(value)
    return made
