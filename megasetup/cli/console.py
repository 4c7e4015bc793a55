"""How the commands speak: tables on standard output, progress on standard error and on a terminal only.

One place for widths and units, so that every command prints numbers the same way and a piped or logged run holds
tables and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

# Files and pipes have no width of their own; this one keeps the widest table on one line.
_PIPE_WIDTH = 132


def stdout() -> Console:
    """The console that results go to."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def title(console: Console, text: str) -> None:
    """Print what stands above a table (rich's own titles wrap at the table's width)."""
    console.print(f"[bold]{escape(text)}[/bold]")


def table(columns: Sequence[str], *, text_columns: int = 1) -> Table:
    """An empty table; the first `text_columns` columns read from the left, the others are numbers."""
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        result.add_column(column, justify="left" if index < text_columns else "right", overflow="fold")
    return result


def facts() -> Table:
    """An empty two-column table of names and values, without a header."""
    result = Table(box=None, show_header=False, pad_edge=False)
    result.add_column(style="dim", no_wrap=True, min_width=24)
    result.add_column(overflow="fold")
    return result


class Steps:
    """A bar that counts the steps of a long command."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total)

    def next(self, what: str) -> None:
        """Say what happens now; the step before it is done."""
        description = self._progress.tasks[0].description
        self._progress.update(self._task, description=what, advance=1 if description else 0)


@contextmanager
def steps(total: int) -> Iterator[Steps]:
    """Show progress over `total` steps on standard error while the block runs, if that is a terminal."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), BarColumn(bar_width=24), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Steps(progress, total)


def gigabytes(count: float) -> str:
    """A byte count in GB (10^9), or in MB below a tenth of one."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def bandwidth(bytes_per_second: float) -> str:
    """Bytes a second in TB/s or GB/s."""
    if bytes_per_second >= 1e12:
        return f"{bytes_per_second / 1e12:.2f} TB/s"
    return f"{bytes_per_second / 1e9:.1f} GB/s"


def amount(count: int) -> str:
    """A parameter count in billions, or in millions below a tenth of one."""
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.1f} M"


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def rate(elements_per_second: float) -> str:
    """G elements a second, three figures."""
    return f"{elements_per_second / 1e9:.3g}"


def percent(share: float | None) -> str:
    """A share as a percentage, or a dash where there is none."""
    return "-" if share is None else f"{share:.1%}"


def times(ratio: float | None) -> str:
    """A ratio as "3.1x", or a dash where there is none."""
    return "-" if ratio is None else f"{ratio:.2f}x"
