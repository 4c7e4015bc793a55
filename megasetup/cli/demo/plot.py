"""The picture of the demo's losses: what the first optimizer step does without the refresh and with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

_COLOURS = {"without": "#b0322a", "with": "#2a7f3f"}


def draw(losses: Mapping[str, Mapping[str, Sequence[float]]], file: Path) -> bool:
    """Draw the losses of every kind of model into a PNG file.

    Args:
        losses: by kind, then by "without" and "with" the refresh: the loss before each step and after the last one.
        file: the picture.

    Returns:
        Whether it was drawn; matplotlib may be missing.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(losses), figsize=(4.5 * len(losses), 3.6), layout="constrained", sharey=True, squeeze=False
    )
    for panel, (kind, ways) in zip(axes[0], losses.items(), strict=True):
        for way, found in ways.items():
            panel.plot(range(len(found)), found, marker="o", color=_COLOURS[way], label=f"{way} the refresh")
        panel.set_yscale("log")
        panel.set_title(kind, loc="left")
        panel.set_xlabel("optimizer steps")
        panel.set_xticks(range(max(map(len, ways.values()))))
        panel.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("loss")
    axes[0][-1].legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
    return True
