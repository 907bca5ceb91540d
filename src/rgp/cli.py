"""The `rgp` command. Needs the extra `rgp[cli]`; nothing else in rgp imports this file.

Each command is a plain function, registered on `app` at the end of the file: to move a group of commands, move its
functions and its lines there. A ValueError from any command is shown as one line, with exit code 2.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from typing import TYPE_CHECKING, Annotated, Any

from rgp import accounting
from rgp import bands as correlated
from rgp.accountants import ACCOUNTANTS, accountant_help, find_accountant
from rgp.band_choice import choose, evaluate
from rgp.rounding import finite, percent_up, round_up

if TYPE_CHECKING:
    import typer
else:
    try:
        import typer
    except ImportError:  # the annotations below are never evaluated then, and main() says what to install
        typer = None


def main() -> None:
    """Entry point of the command."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError:
        print("rgp's command needs: pip install 'rgp[cli]'", file=sys.stderr)
        raise SystemExit(1) from None
    app()


# rgp account, rgp calibrate

if typer is not None:
    Rate = Annotated[float | None, typer.Option(help="Probability q with which each example is drawn into a batch.")]
    Steps = Annotated[int | None, typer.Option(help="Number of batches drawn, empty ones included.")]
    Size = Annotated[int | None, typer.Option("--dataset-size", help="Number of examples N.")]
    Batch = Annotated[int | None, typer.Option("--batch-size", help="Expected batch size B; q is then B / N.")]
    Units = Annotated[
        int | None,
        typer.Option(
            help="Number of persons U, where a person has several rows: in place of --dataset-size, and B counts persons."
        ),
    ]
    Epochs = Annotated[
        float | None, typer.Option(help="Passes over the data; the number of steps is then epochs times N / B.")
    ]
    Delta = Annotated[
        float | None,
        typer.Option(
            help="Probability with which epsilon may fail. Default, with --dataset-size: 1/(10 N), at most 1e-5."
        ),
    ]
    Accountant = Annotated[
        str, typer.Option(metavar="|".join(ACCOUNTANTS), help=f"How losses are added up. {accountant_help()}.")
    ]
    Bands = Annotated[
        str,
        typer.Option(metavar="b|auto", help="Steps over which noise is correlated; 1 is independent noise."),
    ]
    Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def account(
    noise_multiplier: Annotated[float, typer.Option(help="Noise standard deviation divided by the clipping norm.")],
    sampling_rate: Rate = None,
    steps: Steps = None,
    dataset_size: Size = None,
    batch_size: Batch = None,
    epochs: Epochs = None,
    units: Units = None,
    delta: Delta = None,
    accountant: Accountant = "pld",
    bands: Bands = "1",
    as_json: Json = False,
) -> None:
    """Noise -> epsilon: what a run spends.

    Batches are Poisson samples; neighbouring datasets differ by one example, added or removed.

    \b
    Examples:
      rgp account --noise-multiplier 1.5 --sampling-rate 0.04 --steps 2250 --delta 1e-5
      rgp account --noise-multiplier 1.5 --dataset-size 50000 --batch-size 2000 --epochs 90
    """
    rate, steps, delta = _run(sampling_rate, steps, dataset_size, batch_size, epochs, delta, units)
    if bands == "auto":
        raise ValueError("--bands auto needs a budget at which to compare: rgp calibrate --epsilon ... --bands auto")
    b = _whole_bands(bands, steps)
    events = list(correlated.events(steps=steps, bands=b, sampling_rate=rate, noise_multiplier=noise_multiplier))
    spent = accounting.epsilon(events, delta=delta, accountant=accountant)
    facts = {
        "epsilon": spent,
        "delta": delta,
        "noise_multiplier": noise_multiplier,
        "sampling_rate": rate,
        "steps": steps,
        **_group_facts(b, rate, steps),
        "accountant": accountant,
        "neighbours": "add-or-remove-one",
        **({} if units is None else {"units": units}),
    }
    noun = "example" if units is None else "unit"
    sentence = "Without noise there is no privacy: epsilon is infinite."
    if find_accountant(accountant).profile is not None:
        meaning = accounting.meaning(events, delta=delta, accountant=accountant)
        facts |= {
            "mu": meaning.mu,
            "tpr_at_0.001": meaning.tpr_at_0_1_percent,
            "tpr_at_0.01": meaning.tpr_at_1_percent,
        }
        if math.isfinite(spent):
            sentence = (
                "An attacker who sees every released weight recognises at most "
                f"{percent_up(meaning.tpr_at_0_1_percent)} of the {noun}s that were used if 0.1% of the others may be "
                f"taken for used by mistake, and {percent_up(meaning.tpr_at_1_percent)} if 1% may."
            )
    elif math.isfinite(spent):
        sentence = (
            f"With or without any one {noun}, no outcome is more than "
            f"exp({round_up(spent, 4)}) times as likely, except with probability {delta:g}."
        )
    _show("What this run spends", facts, sentence, as_json)


def calibrate(
    epsilon: Annotated[float, typer.Option(help="The budget: what all steps together may spend.")],
    sampling_rate: Rate = None,
    steps: Steps = None,
    dataset_size: Size = None,
    batch_size: Batch = None,
    epochs: Epochs = None,
    units: Units = None,
    delta: Delta = None,
    accountant: Accountant = "pld",
    bands: Bands = "1",
    momentum: Annotated[float, typer.Option(help="With --bands: SGD's momentum; 0 for Adam.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Epsilon -> noise: the smallest noise multiplier that keeps a run within its budget.

    Batches are Poisson samples; neighbouring datasets differ by one example, added or removed.

    \b
    Examples:
      rgp calibrate --epsilon 8 --delta 1e-5 --sampling-rate 0.04 --steps 2250
      rgp calibrate --epsilon 8 --dataset-size 67349 --batch-size 2000 --epochs 30
      rgp calibrate --epsilon 8 --dataset-size 67349 --batch-size 512 --epochs 1 --bands auto
      rgp calibrate --epsilon 8 --units 6920 --batch-size 500 --epochs 30
    """
    rate, steps, delta = _run(sampling_rate, steps, dataset_size, batch_size, epochs, delta, units)
    asked: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "steps": steps, "accountant": accountant}
    choice = None
    if bands == "auto":  # only their ratio counts
        choice = choose(**asked, momentum=momentum, dataset_size=10**9, batch_size=rate * 10**9)
    elif _whole_bands(bands, steps) > 1:
        choice = evaluate(_whole_bands(bands, steps), sampling_rate=rate, momentum=momentum, **asked)
    b = 1 if choice is None else choice.bands
    sigma = correlated.calibrate(sampling_rate=rate, bands=b, **asked)
    planned = correlated.events(steps=steps, bands=b, sampling_rate=rate, noise_multiplier=sigma)
    spent = accounting.epsilon(planned, delta=delta, accountant=accountant)
    facts = {
        "noise_multiplier": sigma,
        "epsilon": spent,
        "target_epsilon": epsilon,
        "delta": delta,
        "sampling_rate": rate,
        "steps": steps,
        **_group_facts(b, rate, steps),
        "accountant": accountant,
        "neighbours": "add-or-remove-one",
        **({} if units is None else {"units": units}),
    }
    sentence = (
        f"Noise of {round_up(sigma, 4)} times the clipping norm in each of {steps} steps stays within epsilon {epsilon:g}; "
        f"{1 / accounting.RESOLUTION:g} less would not."
    )
    if choice is not None and b > 1:
        facts |= {
            "times_less_noise_in_weights": choice.factor_mean,
            "times_less_after_last_step": choice.factor_last,
            "times_more_noise_in_a_step": choice.step_factor,
        }
        sentence = sentence.replace("Noise of", "Fresh noise of") + f" {str(choice)[0].upper()}{str(choice)[1:]}."
    elif bands == "auto":
        sentence += " Correlated noise would gain less than 5% here: independent noise is the best."
    _show("The least noise for this budget", facts, sentence, as_json)


def _whole_bands(bands: str, steps: int) -> int:
    if not bands.isdecimal() or not 1 <= int(bands) <= steps:
        raise ValueError(f"--bands {bands} must be auto, or a whole number from 1 to the number of steps, {steps}.")
    return int(bands)


def _group_facts(bands: int, rate: float, steps: int) -> dict[str, Any]:
    if bands == 1:
        return {}
    return {
        "bands": bands,
        "rate_in_a_group": correlated.group_rate(rate, bands),
        "draws_per_group": -(-steps // bands),
    }


def _run(
    rate: float | None,
    steps: int | None,
    dataset_size: int | None,
    batch_size: int | None,
    epochs: float | None,
    delta: float | None,
    units: int | None = None,
) -> tuple[float, int, float]:
    """(rate, steps, delta), from whichever of the two complete sets of options was given."""
    sizes = {"--dataset-size": dataset_size, "--batch-size": batch_size, "--epochs": epochs}
    if units is not None:
        if dataset_size is not None:
            raise ValueError(
                f"--units {units} and --dataset-size {dataset_size} both say how many there are to draw from: with persons, "
                "it is their number that sampling rates and delta refer to. Give --units alone."
            )
        sizes, dataset_size = {**sizes, "--units": units}, units
    given = {"--sampling-rate": rate, "--steps": steps, **sizes}
    named = " ".join(name for name, value in given.items() if value is not None) or "none of them"
    if rate is not None and steps is not None and all(value is None for value in sizes.values()):
        if delta is None:
            raise ValueError(
                "--delta is needed with --sampling-rate and --steps: take a value well below 1/N, such as 1e-5 for "
                "10,000 examples; --dataset-size, --batch-size and --epochs would choose one."
            )
        return rate, steps, delta
    if dataset_size is None or batch_size is None or epochs is None or rate is not None or steps is not None:
        raise ValueError(
            "give either --sampling-rate and --steps, or --dataset-size, --batch-size and --epochs: one set, complete, "
            f"and nothing of the other. Given: {named}."
        )
    planned = accounting.planned_steps(epochs, dataset_size, batch_size)
    if batch_size > dataset_size:
        what = "--dataset-size" if units is None else "--units"
        raise ValueError(f"--batch-size {batch_size} must be at most {what} {dataset_size}.")
    if delta is None:
        delta = accounting.default_delta(dataset_size)
    accounting.check_delta(delta, dataset_size)
    return batch_size / dataset_size, planned, delta


# Output

_LABELS = {
    "mu": "mu of Gaussian privacy",
    "tpr_at_0.001": "recognised at 0.1% false alarms",
    "tpr_at_0.01": "recognised at 1% false alarms",
}


def _show(title: str, facts: dict[str, Any], sentence: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({k: finite(v) if isinstance(v, float) else v for k, v in facts.items()}, allow_nan=False))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    for i, (name, value) in enumerate(facts.items()):
        table.add_row(_LABELS.get(name, name.replace("_", " ")), _text(name, value), style="bold" if i == 0 else None)
    console = Console(highlight=False)
    console.print(table)
    console.print(sentence)


def _text(name: str, value: Any) -> str:
    if name.startswith("tpr"):
        return percent_up(value)
    if name in ("epsilon", "mu", "noise_multiplier"):
        return round_up(value, 4)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _flowing(text: str) -> str:
    """A docstring whose paragraphs the terminal wraps; those after \\b stay as they are."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(p if p.startswith("\b") else " ".join(p.split()) for p in paragraphs)


if typer is not None:
    from typer.core import TyperGroup

    class _Commands(TyperGroup):
        def invoke(self, ctx: Any) -> Any:
            try:
                return super().invoke(ctx)
            except ValueError as error:
                typer.echo(f"rgp: {error}", err=True)
                raise typer.Exit(2) from error

    app = typer.Typer(
        cls=_Commands,
        name="rgp",
        help="Train PyTorch models with differential privacy. New here? rgp demo shows what it costs and gives.",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def _group() -> None:
        """Keeps `rgp account` a subcommand whatever else is registered."""

    from rgp.analysis import command as _analysis
    from rgp.attacks import command as _attack
    from rgp.audit import command as _audit
    from rgp.bench import command as _bench
    from rgp.data import command as _data
    from rgp.demo import command as _demo
    from rgp.doctor import command as _doctor
    from rgp.planning import command as _plan
    from rgp.report import command as _report
    from rgp.reproduce import command as _reproduce
    from rgp.train import command as _train
    from rgp.tuning import command as _tune

    for _group_of_commands in (
        _train,
        _demo,
        _doctor,
        _data,
        _report,
        _bench,
        _analysis,
        _attack,
        _audit,
        _plan,
        _reproduce,
        _tune,
    ):
        _group_of_commands.register(app)
    app.command()(account)
    app.command()(calibrate)
    for _command in app.registered_commands:
        _command.help = _flowing(_command.callback.__doc__ or "")
