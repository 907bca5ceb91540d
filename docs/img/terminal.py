"""Makes terminal.png and report.png: `rgp demo`, run in a pseudo-terminal, drawn by rich, photographed by Chromium.

    python docs/img/terminal.py [COMMAND...]

The command is really run, in an empty folder; terminal.png shows the last state of its terminal, report.png the top of the
report that it wrote. Run it on a quiet machine: the demo measures times.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 94, 60
PICTURES = Path(__file__).parent


def record(command: list[str], folder: str) -> str:
    """All that the command writes to a terminal of COLUMNS columns."""
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONWARNINGS": "ignore"}
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    written = b""
    while True:
        try:
            block = os.read(terminal, 1 << 16)
        except OSError:  # how Linux says that the other side is closed
            block = b""
        if not block:
            break
        written += block
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise SystemExit(f"{' '.join(command)} ended with code {code}\n{written.decode()}")
    return written.decode()


def last_screen(written: str) -> list[Text]:
    """What stands there in the end: a progress bar is written over itself many times."""
    lines: list[list[str]] = [[]]
    row, column, style = 0, 0, ""
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b.|.", written, re.DOTALL):
        if part == "\n":
            row += 1
            if row == len(lines):
                lines.append([])
        elif part == "\r":
            column = 0
        elif part.endswith("A") and part.startswith("\x1b["):
            row = max(0, row - int(part[2:-1] or 1))
        elif part.endswith("K") and part.startswith("\x1b["):
            lines[row] = []
        elif part.endswith("m") and part.startswith("\x1b["):
            style = "" if part in ("\x1b[0m", "\x1b[m") else style + part
        elif part[0] != "\x1b":
            lines[row] += [" "] * (column - len(lines[row]))
            lines[row][column : column + 1] = [f"{style}{part}\x1b[0m"]
            column += 1
    return [Text.from_ansi("".join(line)) for line in lines]


def draw(title: str, lines: list[Text], folder: Path) -> None:
    while lines and not lines[-1].plain.strip():
        lines.pop()
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        for line in lines:
            console.print(line, overflow="fold")  # long lines go on below, as in a terminal
    svg = console.export_svg(title=title)
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # fonts of the network: the machine's own do
    svg = svg.replace("Fira Code", "DejaVu Sans Mono")
    width, height = (round(float(n)) for n in re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups())
    page = folder / "page.html"
    page.write_text(f'<body style="margin:0">{svg}</body>', encoding="utf-8")
    photograph(page, PICTURES / "terminal.png", width, height)


def photograph(page: Path, picture: Path, width: int, height: int) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("a browser is needed: apt-get install chromium")
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={width},{height}"]
    command = [browser, *options, "--default-background-color=00000000", f"--screenshot={picture}", str(page)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    print(f"written: {picture}")


if __name__ == "__main__":
    words = sys.argv[1:] or ["rgp", "demo"]
    with tempfile.TemporaryDirectory() as name:
        screen = last_screen(record(words, name))
        draw(" ".join(words), screen, Path(name))
        report = Path(name, "runs/demo/report.html")
        if report.exists():
            photograph(report, PICTURES / "report.png", 980, 1180)
