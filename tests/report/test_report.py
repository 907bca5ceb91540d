"""The report: complete in itself, escaped, honest about what is covered, and readable in a real browser."""

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from rgp import accounting
from rgp.accounting import Event
from rgp.ledger import Ledger
from rgp.report import RunError, words, write
from rgp.report.charts import ticks

BROWSER = next((b for b in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if b), None)
STAMP = "Not covered by the guarantee"


def make_run(folder, *, method="rgp", sigma=1.9, steps=60, best=0.93, published=False, attack=0.502, seed=None, **more):
    """A run's folder as `rgp train` leaves it, with a real ledger and made-up results."""
    folder.mkdir(parents=True)
    rows, batch, delta = 1438, 128, 1e-5
    rate, private = batch / rows, sigma > 0
    header = {"dataset_size": rows, "delta": delta, "accountant": "pld", "worst": {"q": rate, "sigma": sigma}}
    ledger = Ledger(header)
    for step in range(steps):
        ledger.append(step=step, attempt=0, q=rate, sigma=sigma, digest=None)
    ledger.move_to(folder)
    ledger.close()

    def spent(count):
        return accounting.epsilon([Event(rate, sigma, count)], delta=delta) if private else None

    summary = {
        "method": method,
        "dataset": "digits",
        "model": "small-cnn",
        "accuracy": best,
        "accuracy_is_publishable": published,
        "epsilon": spent(steps),
        "delta": delta if private else None,
        "accountant": "pld" if private else None,
        "noise_multiplier": sigma if private else None,
        "clip": 1.0,
        "steps": steps,
        "batch_size": batch,
        "sampling_rate": rate,
        "seed": seed,
        "wall_seconds": 41.3 if method == "rgp" else 56.8,
        "step_seconds": 33.0,
        "peak_memory_bytes": 412_000_000,
        "parameters": 62_106,
        "noise_dimensions": 9_338 if method == "rgp" else 62_106 if private else 0,
        "finished": True,
        "planned_steps": steps,
        "training_rows": rows,
        "held_out_rows": 359,
        "device": "cpu",
        "threads": 2,
        **more,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    metrics, hidden = [], []
    for step in range(steps // 6, steps + 1, steps // 6):
        accuracy = best - 0.7 * math.exp(-5 * step / steps)
        metrics.append({"step": step, "epsilon": spent(step), "seconds": step * 0.6})
        hidden.append({"step": step, "training_loss": 2.3 * math.exp(-(4 * best - 1.8) * step / steps)})
        (metrics if published else hidden)[-1]["accuracy"] = accuracy
    if attack is not None:
        result = {"success_rate": attack, "auc": attack + 0.01, "tpr_at_0.001": 0.001, "tpr_at_0.01": 0.012}
        hidden.append(
            {"step": steps, "attack": {**result, "standard_error": 0.026, "members": 1438, "nonmembers": 359}}
        )
    for name, lines in (("metrics", metrics), ("private", hidden)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    treatment = "carried" if method == "rgp" else "exact"
    plan = [
        ("conv1.weight", [32, 1, 3, 3], "exact", 0, 288, "carriers would be no smaller"),
        ("conv2.weight", [64, 32, 3, 3], treatment, 8 if treatment == "carried" else 0, 2752, "convolution"),
        ("norm2.weight", [64], "exact", 0, 64, "norm"),
        ("fc.weight", [128, 320], treatment, 8 if treatment == "carried" else 0, 3520, "linear"),
        ("head.weight", [10, 128], "exact", 0, 1280, "classification head"),
        ("head.bias", [10], "exact", 0, 10, "bias of the head"),
        ("embedding.weight", [50, 32], "frozen", 0, 0, "embedding"),
    ]
    keys = ("name", "shape", "treatment", "rank", "noise_dimensions", "why")
    (folder / "plan.json").write_text(json.dumps([dict(zip(keys, row, strict=True)) for row in plan]))
    return folder


def make_three(folder):
    return [
        make_run(folder / "rgp", best=0.934),
        make_run(folder / "dpsgd", method="dpsgd", best=0.896, attack=0.507),
        make_run(folder / "nonprivate", method="nonprivate", sigma=0.0, best=0.983, attack=0.561),
    ]


def text_of(html):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html.split("</style>")[1]))


class Checker(HTMLParser):
    """Every element is closed in order, and none asks for anything from elsewhere."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self):
        super().__init__()
        self.open, self.names = [], set()

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        for key, value in attrs:
            assert key not in ("src", "href", "xlink:href", "srcset", "onload", "onclick"), (tag, key, value)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check(html):
    checker = Checker()
    checker.feed(html)
    assert not checker.open
    assert not checker.names & {"script", "link", "img", "iframe", "object", "embed"}
    assert "url(" not in html and "@import" not in html
    assert set(re.findall(r"https?://[^\"'<> ]+", html)) <= {"http://www.w3.org/2000/svg"}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("one") / "digits-rgp")
    return folder, write([folder], folder / "report.html").read_text()


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    path = write(make_three(folder), folder / "report.html")
    return path, path.read_text()


def test_a_report_is_one_file_that_loads_nothing(single, compared):
    for _, html in (single, compared):
        check(html)
        assert "default-src 'none'" in html


def test_the_promise_has_this_runs_numbers(single):
    folder, html = single
    summary = json.loads((folder / "summary.json").read_text())
    text = text_of(html)
    means = accounting.meaning([Event(128 / 1438, 1.9, 60)], delta=1e-5)
    assert f"ε = {words.epsilon_text(summary['epsilon'])} at δ = 10⁻⁵" in text
    assert f"right at most {words.ceiling(words.coin(means.mu))}" in text
    assert f"find at most {words.ceiling(means.tpr_at_1_percent)}" in text
    assert f"find at most {words.ceiling(means.tpr_at_0_1_percent)}" in text
    assert "1 in 100,000" in text and "each of the 1,438 training rows" in text
    assert "conv2.weight" in text and "412 MB" in text and "41.3 s" in text


def sheet_of(html):
    found = re.search(r'<section class="signing">.*?</section>', html, re.S)
    return text_of("</style>" + found.group()) if found else ""


def test_sheet_for_the_person_who_signs(single, compared, tmp_path):
    """The promise in words, what is on record, what to ask; nothing that the guarantee does not cover."""
    sheet = sheet_of(single[1])
    means = accounting.meaning([Event(128 / 1438, 1.9, 60)], delta=1e-5)
    assert f"finds at most {words.ceiling(means.tpr_at_1_percent)}" in sheet and "1 in 100,000" in sheet
    assert "adds up to the ε above" in sheet and "nobody has seen them" in sheet and "No audit was run" in sheet
    assert "Is one row one person?" in sheet and "Signature" in sheet
    assert "93" not in sheet  # the accuracy on private rows
    assert sheet_of(compared[1]) == ""  # each run has a sheet of its own

    seeded = sheet_of(write([make_run(tmp_path / "seeded", seed=7)], tmp_path / "r.html").read_text())
    assert "whoever knows it can undo the protection" in seeded and "nobody has seen" not in seeded
    wrong = sheet_of(write([make_run(tmp_path / "wrong", epsilon=0.5)], tmp_path / "r.html").read_text())
    assert "Do not sign" in wrong and "adds up to" not in wrong
    plain = make_run(tmp_path / "plain", method="nonprivate", sigma=0.0)
    assert sheet_of(write([plain], tmp_path / "r.html").read_text()) == ""


def test_what_is_not_covered_is_in_the_marked_section_alone(single):
    _, html = single
    private = re.search(r'<section class="private">.*?</section>', html, re.S).group()
    public = html.replace(private, "")
    assert STAMP in private and STAMP not in public
    for words_ in ("Training loss over steps", "A real attack", "Accuracy over steps"):
        assert words_ in private and words_ not in public
    assert "on held-out private rows: not covered" in public  # the one number at the top says so itself


def test_accuracy_on_a_published_test_split_needs_no_mark(tmp_path):
    folder = make_run(tmp_path / "cifar", published=True, attack=None)
    (folder / "private.jsonl").unlink()
    html = write([folder], tmp_path / "r.html").read_text()
    assert "Accuracy over steps" in html and STAMP not in html and "of the published test rows" in html


def test_a_comparison_has_a_table_a_trade_off_and_every_run(compared):
    text = text_of(compared[1])
    for words_ in ("3 runs compared", "Side by side", "Accuracy against ε", "no privacy", "93.4%", "89.6%", "98.3%"):
        assert words_ in text
    total = 2 * accounting.epsilon([Event(128 / 1438, 1.9, 60)], delta=1e-5)
    assert f"ε = {words.epsilon_text(total)} at δ = 2×10⁻⁵" in text
    assert "56.1% ± 5.2" in text and "no limit" in text


def test_a_run_without_privacy_says_so(tmp_path):
    html = write([make_run(tmp_path / "plain", method="nonprivate", sigma=0.0)], tmp_path / "r.html").read_text()
    text = text_of(html)
    assert "This run promises nothing" in text and "What this run promises" not in text and "Infinity" not in html


def test_everything_from_files_is_escaped(tmp_path):
    evil = '<script>alert("x")</script>'
    folder = make_run(tmp_path / "a<b>&'\"", dataset=evil, model=evil, method=evil, accountant="pld", device=evil)
    plan = json.loads((folder / "plan.json").read_text())
    plan[0].update(name=evil, why=evil, treatment=evil)
    (folder / "plan.json").write_text(json.dumps(plan))
    html = write([folder, folder], tmp_path / "r.html").read_text()
    check(html)
    html = write([folder], tmp_path / "r.html").read_text()
    check(html)
    assert "&lt;script&gt;alert" in html


def test_a_ledger_that_was_tampered_with_or_adds_up_to_more_is_reported(tmp_path):
    folder = make_run(tmp_path / "run", epsilon=0.5)
    assert "The ledger adds up to epsilon" in write([folder], tmp_path / "r.html").read_text()
    lines = (folder / "ledger.jsonl").read_text().splitlines(keepends=True)
    (folder / "ledger.jsonl").write_text("".join(lines[:10] + lines[11:]))
    text = text_of(write([folder], tmp_path / "r.html").read_text())
    assert "The ledger could not be checked" in text and "right at most" in text


def test_a_bare_or_torn_folder_still_gives_a_page(tmp_path):
    folder = make_run(tmp_path / "run", seed=7)
    for name in ("plan.json", "ledger.jsonl"):
        (folder / name).unlink()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 70, "eps')
    text = text_of(write([folder], tmp_path / "r.html").read_text())
    assert "who knows the seed" in text
    (folder / "summary.json").write_text('{"accuracy": null, "epsilon": null}')
    check(write([folder], tmp_path / "r.html").read_text())


def test_folders_that_are_no_runs_are_named(tmp_path):
    with pytest.raises(RunError, match=r"elsewhere.*summary\.json"):
        write([tmp_path / "elsewhere"], tmp_path / "r.html")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(RunError, match=r"only notes\.txt"):
        write([tmp_path], tmp_path / "r.html")
    with pytest.raises(RunError, match="at least one run"):
        write([], tmp_path / "r.html")


def test_bounds_are_rounded_up():
    assert words.epsilon_text(2.991) == "3.00" and words.epsilon_text(8.0) == "8.00"
    assert words.ceiling(0.7121) == "71.3%" and words.ceiling(0.99999) == "99.9+%" and words.ceiling(1.0) == "100.0%"
    assert words.factor(3.0) == "21" and words.factor(8.0) == "3,000" and words.factor(0.5) == "1.7"
    assert words.small(1e-5) == "10⁻⁵" and words.small(1 / 14380) == "7×10⁻⁵" and words.small(9.99e-6) == "10⁻⁵"
    assert words.odds(1e-5) == "1 in 100,000" and words.odds(1 / 14380) == "1 in 14,000"


def test_an_attack_that_finds_nothing_is_said_to_find_nothing():
    from rgp.report.attacks import better_than_a_coin

    good, bad = ({"success_rate": rate, "standard_error": 0.02} for rate in (0.56, 0.53))
    assert better_than_a_coin([("a", bad), ("b", bad)]).startswith("No row here has more right guesses than a coin")
    both = better_than_a_coin([("a", good), ("b", bad)])
    assert "More right guesses than a coin: a." in both and "No more than a coin: b." in both
    assert (
        "than a coin: a, b." in better_than_a_coin([("a", good), ("b", good)]) and better_than_a_coin([("a", {})]) == ""
    )


def test_a_coin_is_what_delta_at_epsilon_zero_allows():
    mu = 1.3
    total_variation = math.erf(mu / 2 / math.sqrt(2))  # 2 Phi(mu/2) - 1, the distance of N(0, 1) and N(mu, 1)
    assert words.coin(mu) == pytest.approx(0.5 + total_variation / 2)
    assert words.coin(0) == 0.5 and words.coin(math.inf) == pytest.approx(1)


@pytest.mark.parametrize(("low", "high"), [(0, 7.3), (0.31, 0.934), (0, 2250), (0.5, 0.5), (0, 1e-4), (0.9, 0.9001)])
def test_ticks_are_few_round_and_around(low, high):
    values = ticks(low, high)
    assert 2 <= len(values) <= 8 and values[0] <= low + 1e-12 and values[-1] >= high - 1e-12
    assert all(a < b for a, b in pairwise(values))


def test_the_command_writes_where_it_says(tmp_path):
    typer = pytest.importorskip("typer")
    from typer.testing import CliRunner

    from rgp.report.command import register

    app = typer.Typer()
    register(app)
    app.command("other")(lambda: None)
    folder = make_run(tmp_path / "run")
    result = CliRunner().invoke(app, ["report", str(folder)])
    assert result.exit_code == 0 and result.output.strip() == str(folder / "report.html")
    result = CliRunner().invoke(app, ["report", str(folder), str(folder), "--out", str(tmp_path / "sub" / "c.html")])
    assert result.exit_code == 0 and (tmp_path / "sub" / "c.html").exists()


def browse(tmp_path, *options):
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --hide-scrollbars"
    command = [BROWSER, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(BROWSER is None, reason="no browser: apt-get install chromium")
def test_in_a_browser_nothing_is_wider_than_a_phone(compared, tmp_path):
    """The page is loaded in a frame as wide as a phone, and says itself how wide it became."""
    html = compared[0].read_text().replace(re.search(r"<meta http-equiv[^>]+>", compared[1]).group(), "")
    (tmp_path / "page.html").write_text(html)
    (tmp_path / "probe.html").write_text(
        "<body><iframe id=f src=page.html style='width:360px;height:2000px'></iframe><script>f.onload=()=>{"
        "const d=f.contentDocument; document.title='w'+d.documentElement.scrollWidth+' s'+"
        "d.querySelectorAll('svg').length+' t'+[...d.querySelectorAll('.table')].filter(t=>t.scrollWidth>t.clientWidth)"
        ".length+' h'+d.documentElement.scrollHeight}</script>"
    )
    url = (tmp_path / "probe.html").as_uri()
    done = browse(tmp_path, "--allow-file-access-from-files", "--virtual-time-budget=3000", "--dump-dom", url)
    found = re.search(r"<title>w(\d+) s(\d+) t(\d+) h(\d+)</title>", done.stdout)
    width, figures, cut_tables, height = map(int, found.groups())
    assert width <= 360 and figures == 4 and cut_tables == 0 and height > 2000


@pytest.mark.skipif(BROWSER is None, reason="no browser: apt-get install chromium")
def test_a_browser_draws_it_light_dark_and_on_paper(single, tmp_path):
    url = (single[0] / "report.html").as_uri()
    pictures = {}
    for name, extra in (("light", ()), ("dark", ("--blink-settings=preferredColorScheme=0",))):
        path = tmp_path / f"{name}.png"
        browse(tmp_path, *extra, "--window-size=1280,900", f"--screenshot={path}", url)
        pictures[name] = path.read_bytes()
    assert all(len(p) > 20_000 for p in pictures.values())
    brightness = {name: corner(p) for name, p in pictures.items()}
    assert brightness["light"] > 200 > 60 > brightness["dark"]
    browse(tmp_path, f"--print-to-pdf={tmp_path / 'page.pdf'}", url)
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


def corner(png):
    """Brightness of the first pixel."""
    image = pytest.importorskip("PIL.Image")
    import io

    return sum(image.open(io.BytesIO(png)).convert("RGB").getpixel((2, 2))) / 3
