"""The picture of a sync benchmark: a bar for each way, and the wire's limits as lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megasetup.cli.console import amount
from megasetup.cli.errors import CommandError

_PER_TENSOR, _PLAN = "#9aa5b1", ("#1f77b4", "#5a9bd0", "#97c1e3", "#c6dcf0")


def check(file: Path) -> None:
    """Say that the picture cannot be drawn before the benchmark has run for nothing.

    Raises:
        CommandError: the file's name is no PNG's, or matplotlib is not installed.
    """
    if file.suffix.lower() != ".png":
        raise CommandError(f"--plot {file}: the picture is a PNG, so give a name that ends in .png")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise CommandError("--plot needs matplotlib: pip install 'megasetup[plot]'") from error


def draw(data: dict[str, Any], file: Path) -> None:
    """Draw the results of `bench sync` (its JSON) into a PNG file."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    results = data["results"]
    figure, axes = pyplot.subplots(figsize=(max(7.0, 2.4 * len(results) + 2), 4.5), layout="constrained")
    seen: set[str] = set()
    for group, result in enumerate(results):
        bars: list[tuple[str, float, str]] = []
        if result["per_tensor"] is not None:
            bars.append(("per tensor", result["per_tensor"]["elements_per_second"], _PER_TENSOR))
        for index, way in enumerate(result["plan"]):
            threads = f"megasetup, {way['threads']} CPU thread{'s' if way['threads'] > 1 else ''}"
            bars.append((threads, way["elements_per_second"], _PLAN[index % len(_PLAN)]))
        width = 0.8 / len(bars)
        for index, (name, rate, colour) in enumerate(bars):
            where = group - 0.4 + width * (index + 0.5)
            axes.bar(where, rate / 1e9, width * 0.92, color=colour, label=None if name in seen else name)
            axes.annotate(f"{rate / 1e9:.3g}", (where, rate / 1e9), ha="center", va="bottom", fontsize=8)
            seen.add(name)
    limit = data["limits"]["bf16_limit_elements_per_second"]
    if limit is not None:
        axes.axhline(limit / 1e9, color="#2a7f3f", linestyle="--", linewidth=1, label="wire, BF16 (2 bytes)")
        axes.axhline(limit / 2e9, color="#b05a2a", linestyle=":", linewidth=1, label="wire, FP32 (4 bytes)")
    names = [f"{r['shapes']}\n{r['mode']}\n{r['tensors']:,} tensors, {amount(r['parameters'])}" for r in results]
    axes.set_xticks(range(len(results)), names)
    axes.set_ylabel("G elements a second")
    axes.set_title("Refreshing the FP32 copies of every weight", loc="left")
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
