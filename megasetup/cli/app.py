"""The commands and their options, and nothing else: each command imports its own code when it is called.

So `megasetup --help` does not wait for a benchmark's imports, and this file reads as the table of what can be asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Keeps every FP32 copy of every Megatron weight true, at the speed of the wire between GPU and host.",
)


def _version(asked: bool) -> None:
    if asked:
        import megasetup

        print(megasetup.__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Options that stand before the command."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print plain data instead of tables.")] = False,
) -> None:
    """Say what this machine offers, what is missing and what to do about it."""
    from megasetup.cli import doctor as this

    with _messages(kernels=True) as console:
        found = this.examine()
    advice = this.advise(found)
    if as_json:
        print(json.dumps({**found, "what_to_do": advice}, indent=2))
    else:
        this.show(found, advice, console)
    if not this.healthy(found):
        raise typer.Exit(1)


bench = typer.Typer(no_args_is_help=True, help="Time the usual way and ours, in turn, on the same tensors.")
app.add_typer(bench, name="bench")

_Json = Annotated[Path | None, typer.Option("--json", help="Write every figure, with the environment, to this file.")]
_Device = Annotated[str | None, typer.Option(help="cuda, cuda:1 or cpu. Default: a GPU if there is one.")]


@contextmanager
def _messages(*, kernels: bool = False, json_file: Path | None = None, plot: Path | None = None) -> Iterator[Console]:
    """The console for results; an error that the user can mend ends the command as one message.

    The kernels, for a command that runs them, are chosen first, and the files that it will write found writable.
    """
    from megasetup.cli.console import stdout
    from megasetup.cli.errors import CommandError
    from megasetup.cli.output import check_writable
    from megasetup.cli.settings import check_kernels

    try:
        if kernels:
            check_kernels()
        check_writable("--json", json_file)
        check_writable("--plot", plot)
        yield stdout()
    except CommandError as error:
        typer.secho(f"Error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from error


@bench.command()
def sync(
    shapes: Annotated[
        str,
        typer.Option(help="qwen2.5-7b, qwen3-30b-a3b-quarter, llama-3.1-8b or tiny; several with commas between."),
    ] = "tiny",
    safetensors: Annotated[
        Path | None, typer.Option(help="A checkpoint folder whose tensors to use instead of --shapes.")
    ] = None,
    scale: Annotated[float, typer.Option(help="Keep this share of the layers of --shapes.")] = 1.0,
    mode: Annotated[str, typer.Option(help="standard, precision-aware or both.")] = "both",
    levels: Annotated[
        str | None, typer.Option(help="Refresh these levels alone, as in 1,2. Default: all of the mode.")
    ] = None,
    threads: Annotated[
        str | None, typer.Option(help="CPU threads, each count timed, as in 8,2,1. Default: the package's own.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of our way.")] = 5,
    baseline_repeat: Annotated[int, typer.Option(min=0, help="Runs of the per-tensor path; 0 leaves it out.")] = 2,
    ranks: Annotated[
        int, typer.Option(min=1, help="Processes that sync at the same time, each with a GPU and a shard of its own.")
    ] = 1,
    device: _Device = None,
    json_file: _Json = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the rates into this PNG file.")] = None,
) -> None:
    """Refresh every FP32 copy: the per-tensor path against one plan."""
    from megasetup.cli.bench.command import run_sync

    with _messages(kernels=True, json_file=json_file, plot=plot) as console:
        run_sync(
            console,
            shape_names=shapes,
            folder=safetensors,
            scale=scale,
            mode=mode,
            levels=levels,
            threads=threads,
            repeat=repeat,
            baseline_repeat=baseline_repeat,
            rank_count=ranks,
            device_name=device,
            json_file=json_file,
            plot_file=plot,
        )


@bench.command()
def step(
    shapes: Annotated[
        str, typer.Option(help="qwen2.5-1.5b, qwen2.5-7b, qwen3-30b-a3b-quarter, llama-3.1-8b or tiny.")
    ] = "tiny",
    scale: Annotated[float, typer.Option(help="Keep this share of the layers of --shapes.")] = 1.0,
    mode: Annotated[str, typer.Option(help="standard, precision-aware or both.")] = "both",
    overlap: Annotated[str, typer.Option(help="Megatron's overlap_cpu_optimizer_d2h_h2d: yes, no or both.")] = "both",
    fraction: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of the optimizer to offload.")] = 1.0,
    steps: Annotated[int, typer.Option(min=0, help="Steps of each way; 0 times the making alone.")] = 5,
    device: _Device = None,
    json_file: _Json = None,
) -> None:
    """Make and step Megatron's hybrid optimizer and ours: time, memory, and the same bits."""
    from megasetup.cli.bench.command import run_step

    with _messages(kernels=True, json_file=json_file) as console:
        run_step(
            console,
            shape_name=shapes,
            scale=scale,
            mode=mode,
            overlap=overlap,
            fraction=fraction,
            step_count=steps,
            device_name=device,
            json_file=json_file,
        )


@bench.command()
def expert_bias(
    routers: Annotated[int, typer.Option(min=1, help="Routers of the model.")] = 60,
    experts: Annotated[int, typer.Option(min=1, help="Experts of a router.")] = 256,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each way.")] = 200,
    device: _Device = None,
    json_file: _Json = None,
) -> None:
    """Recast expert bias to FP32: one .to() each against one launch."""
    from megasetup.cli.bench.command import run_expert_bias

    with _messages(kernels=True, json_file=json_file) as console:
        run_expert_bias(
            console, routers=routers, experts=experts, repeat=repeat, device_name=device, json_file=json_file
        )


@bench.command()
def host(
    elements: Annotated[
        float, typer.Option(min=1, help="Elements of each tensor; choose more than any cache.")
    ] = 256e6,
    threads: Annotated[
        str | None, typer.Option(help="CPU threads of both sides, each count timed, as in 8,2,1.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each way.")] = 7,
    pin_bytes: Annotated[float, typer.Option(min=4096, help="Memory to pin in one block, where there is a GPU.")] = 5e9,
    pin_shapes: Annotated[str, typer.Option(help="Named shape set whose shards are pinned as well.")] = "qwen2.5-7b",
    pin_shards: Annotated[int, typer.Option(min=1, help="Data-parallel ranks that share that set.")] = 8,
    json_file: _Json = None,
) -> None:
    """Time the CPU kernels against torch, and what pinning memory costs."""
    from megasetup.cli.bench.command import run_host

    with _messages(kernels=True, json_file=json_file) as console:
        run_host(
            console,
            elements=int(elements),
            threads=threads,
            repeat=repeat,
            pin_bytes=int(pin_bytes),
            pin_shapes=pin_shapes,
            pin_shards=pin_shards,
            json_file=json_file,
        )


_Config = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="A trainer's config file.")]
_Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, as in policy.precision=float16."),
]


@app.command()
def check(
    config: _Config,
    overrides: _Overrides = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="A key that nobody reads is a problem, not a warning.")
    ] = False,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs of the run. Default: as few as its sizes allow.")
    ] = None,
    weights_path: Annotated[
        Path | None, typer.Option(help="Where the trainer saves weights, to say what would be resumed.")
    ] = None,
    optimizer_path: Annotated[Path | None, typer.Option(help="Where the optimizer state to resume is.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print plain data instead of tables.")] = False,
) -> None:
    """Say everything that is wrong with a config, and what a run with it will do. Needs no GPU."""
    from megasetup.cli.check import examine
    from megasetup.cli.check_tables import show
    from megasetup.cli.console import stdout

    found = examine(
        config,
        overrides or (),
        strict=strict,
        gpus=gpus,
        weights_path=weights_path,
        optimizer_path=optimizer_path,
    )
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        show(found, stdout())
    if not found.ok:
        raise typer.Exit(1)


@app.command()
def plan(
    config: _Config,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of the run.")],
    overrides: _Overrides = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes of the run. Default: 8 GPUs each.")] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(min=0, help="GB of a GPU. Default: this machine's, else an H200's 150.1.")
    ] = None,
    host_memory: Annotated[
        float | None, typer.Option(min=0, help="GB of a node. Default: this machine's if it has a GPU, else 2000.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time syncs by this machine's wire and cores, measured now.")
    ] = False,
    json_file: _Json = None,
) -> None:
    """Say what a run will hold on each GPU and node, whether it fits, and how long a sync takes. Needs no GPU."""
    with _messages(kernels=measure, json_file=json_file) as console:
        from megasetup.cli.plan import run

        fits = run(
            console,
            config,
            overrides or (),
            gpus=gpus,
            nodes=nodes,
            gpu_memory=gpu_memory,
            host_memory=host_memory,
            measure=measure,
            json_file=json_file,
        )
    if not fits:
        raise typer.Exit(1)


_Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model. Read it first.")]


@app.command("import")
def import_(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face id, or a folder with a config.json.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to make. Default: the cache folder in which a trainer looks.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="CONFIG.yaml", help="For parallel sizes, hf_config_overrides and trust.")
    ] = None,
    trust_remote_code: _Trust = False,
    force: Annotated[bool, typer.Option("--force", help="Convert though a checkpoint is there.")] = False,
) -> None:
    """Convert a Hugging Face model to a Megatron checkpoint. Needs no GPU; under torchrun all ranks convert."""
    with _messages() as console:
        from megasetup.cli.conversion import run_import

        run_import(console, model, out=out, config=config, trust_remote_code=trust_remote_code, force=force)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(metavar="DIR", help="A Megatron-Bridge checkpoint.")],
    out: Annotated[Path, typer.Option(help="Hugging Face folder to make.")],
    model: Annotated[
        str | None, typer.Option(help="Hugging Face id or folder of its kind. Default: what it was converted from.")
    ] = None,
    trust_remote_code: _Trust = False,
) -> None:
    """Write a Megatron checkpoint as a Hugging Face folder. Needs no GPU."""
    with _messages() as console:
        from megasetup.cli.conversion import run_export

        run_export(console, checkpoint, out=out, model=model, trust_remote_code=trust_remote_code)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the models and for what was found.")] = Path("demo-output"),
    device: _Device = None,
) -> None:
    """Small real models imported, checked, planned, trained (on a GPU); stale copies found, refreshed, repaired."""
    with _messages(kernels=True) as console:
        from megasetup.cli.bench.command import resolve_device
        from megasetup.cli.demo.command import run

        run(console, out, resolve_device(device))
