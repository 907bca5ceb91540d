"""The `rgp plan` command."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add `plan` to a command line."""
    app.command("plan")(plan)


def plan(
    model: Annotated[
        str,
        typer.Option(
            help="bert-base, minilm, wrn28-4, llama-1b, llama-8b, llama-70b, a folder with config.json, a hub id, or "
            "module:function."
        ),
    ] = "bert-base",
    method: Annotated[str, typer.Option(help="rgp, dpsgd, dpsgd-ghost, dp-lora or plain.")] = "rgp",
    against: Annotated[
        str | None, typer.Option(help="Methods beside it, by comma; all by default, none for none.")
    ] = None,
    rank: Annotated[int, typer.Option(help="Rank of the carriers, and of DP-LoRA's factors.")] = 8,
    sides: Annotated[str, typer.Option(help="both, left, right or alternate.")] = "both",
    source: Annotated[
        str, typer.Option(help="Carriers from history (keeps W_0), weight, momentum or random.")
    ] = "history",
    state: Annotated[str, typer.Option(help="Of the optimizer, for carried weights: full or thin.")] = "full",
    rounding: Annotated[
        str, typer.Option(help="With --state thin, of bfloat16 weights: nearest, stochastic or compensated.")
    ] = "nearest",
    batch: Annotated[int, typer.Option(help="Expected examples per optimizer step, over all ranks.")] = 1024,
    microbatch: Annotated[int, typer.Option(help="Examples that go through the model at once.")] = 32,
    seq: Annotated[int, typer.Option(help="Tokens per example.")] = 128,
    dataset_size: Annotated[int, typer.Option(help="Number of examples N.")] = 67349,
    units: Annotated[
        int | None,
        typer.Option(
            help="Number of persons U, where they have several rows: in place of N, and --batch counts persons."
        ),
    ] = None,
    rows_per_unit: Annotated[int, typer.Option(help="With --units: rows of a person that a step uses at most.")] = 8,
    epochs: Annotated[float, typer.Option(help="Passes over the data.")] = 3,
    epsilon: Annotated[float, typer.Option(help="The budget of the whole run.")] = 8.0,
    delta: Annotated[float | None, typer.Option(help="1/(10 N) by default, 1e-5 at most.")] = None,
    bands: Annotated[
        str, typer.Option(metavar="b|auto", help="Steps over which noise is correlated; 1 is independent noise.")
    ] = "1",
    world_size: Annotated[int, typer.Option(help="Devices that share a batch.")] = 1,
    sharded: Annotated[bool, typer.Option(help="Spread weights, gradients and optimizer state over them.")] = False,
    memory: Annotated[str | None, typer.Option(help="Of one device, such as 24GB: the largest micro-batch.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    optimizer: Annotated[str, typer.Option(help="sgd (with momentum), adam or adamw.")] = "adamw",
    device: Annotated[str, typer.Option(help="gpu or cpu: the form of attention, dropout and optimizer.")] = "gpu",
    task: Annotated[str, typer.Option(help="classification or causal-lm.")] = "classification",
    labels: Annotated[int, typer.Option(help="Classes, for a Hugging Face classifier.")] = 2,
    checkpointing: Annotated[bool, typer.Option(help="Activation checkpointing of a Hugging Face model.")] = False,
    layers: Annotated[bool, typer.Option(help="Also show what each layer gets.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """What a private run would cost, and how noisy it would be: no weights, no data, no training.

    The engine's own step is run on shapes alone, for RGP and beside it for DP-SGD, DP-LoRA and plain training.

    \b
    Examples:
      rgp plan --model bert-base --rank 8 --batch 1024 --microbatch 32 --memory 24GB
      rgp plan --model llama-8b --dtype bfloat16 --world-size 8 --sharded --checkpointing --memory 80GB
    """
    from rgp.planning import estimate, question, show

    rivals = question.METHODS if against is None else tuple(n for n in against.split(",") if n and n != "none")
    asked = question.Question(
        model=model,
        method=method,
        against=rivals,
        rank=rank,
        sides=sides,
        source=source,
        state=state,
        rounding=rounding,
        batch=batch,
        microbatch=microbatch,
        seq=seq,
        dataset_size=dataset_size if units is None else units,
        rows_per_unit=1 if units is None else rows_per_unit,
        epochs=epochs,
        epsilon=epsilon,
        delta=delta,
        bands=bands,
        world_size=world_size,
        sharded=sharded,
        memory=None if memory is None else question.bytes_from(memory),
        dtype=dtype,
        optimizer=optimizer,
        device=device,
        task=task,
        labels=labels,
        checkpointing=checkpointing,
    )
    found = estimate.plan(asked)
    if as_json:
        typer.echo(json.dumps(found, allow_nan=False))
    else:
        show.show(found, layers=layers)
