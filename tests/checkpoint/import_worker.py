"""Conversions in processes that a test starts, kills and looks at afterwards.

python import_worker.py together MODEL TARGET [force]
    waits for a file beside the target, so that several start at once, converts, and prints the answer
python import_worker.py killed MODEL TARGET
    imports everything once, then forks: a child that kills itself (SIGKILL) at each moment of a conversion in turn, and
    after each one that is left alone. Prints one line of JSON a moment.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megasetup.checkpoint import placing
from megasetup.checkpoint.importing import import_model_from_hf
from megasetup.checkpoint.marks import what_is_missing
from megasetup.compat.bridge import import_bridge


def _die(*_arguments: Any, **_keywords: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _after(module: Any, name: str) -> None:
    """Die as soon as a function of a module has done its work."""
    work = getattr(module, name)

    def work_and_die(*arguments: Any, **keywords: Any) -> None:
        work(*arguments, **keywords)
        _die()

    setattr(module, name, work_and_die)


def _at_move(number: int) -> None:
    """Die instead of the n-th rename to or from the target (torch renames files of its own)."""
    rename, moves, target = os.rename, [0], sys.argv[3]

    def count_and_rename(source: Any, goal: Any) -> None:
        moves[0] += target in (str(source), str(goal))
        if moves[0] == number:
            _die()
        rename(source, goal)

    os.rename = count_and_rename


def _tensors_are_written() -> None:
    _after(import_bridge("megatron.core.dist_checkpointing"), "save")


def _config_is_written() -> None:
    from megasetup.checkpoint import converting

    _after(converting, "_save")


def _before_it_is_marked() -> None:
    placing.write_mark = _die  # type: ignore[assignment]


# Each prepares the child; with the last one there is something to be replaced.
_MOMENTS: dict[str, Callable[[], None]] = {
    "weights are loaded": lambda: None,
    "tensors are written": _tensors_are_written,
    "config is written": _config_is_written,
    "before it is marked": _before_it_is_marked,
    "before it is moved": lambda: _at_move(1),
    "between the renames": lambda: _at_move(2),
}


def _in_child(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _killed(model: str, target: Path) -> None:
    import_bridge("megatron.bridge.training.checkpointing")

    def convert(moment: str | None) -> None:
        if moment is not None:
            _MOMENTS[moment]()
        hook = _die if moment == "weights are loaded" else None
        assert import_model_from_hf(model, target, model_post_wrap_hook=hook) is True

    for moment in _MOMENTS:
        shutil.rmtree(target, ignore_errors=True)
        if moment == "between the renames":
            (target / "iter_0000000").mkdir(parents=True)
        status = _in_child(lambda: convert(moment))  # noqa: B023 - the child runs before the next moment
        missing = what_is_missing(target)
        left = [entry.name for entry in target.parent.iterdir() if "importing" in entry.name]
        again = _in_child(lambda: convert(None))
        facts = {
            "moment": moment,
            "status": status,
            "missing": missing,
            "left": len(left),
            "again": again,
            "missing_after": what_is_missing(target),
            "left_after": [entry.name for entry in target.parent.iterdir() if "importing" in entry.name],
        }
        print(json.dumps(facts), flush=True)


def _together(model: str, target: Path, force: bool) -> None:
    import_bridge("megatron.bridge.training.checkpointing")
    (target.parent / f"ready-{os.getpid()}").touch()
    while not (target.parent / "go").exists():
        time.sleep(0.01)
    print("ANSWER", import_model_from_hf(model, target, force=force), flush=True)


if __name__ == "__main__":
    what, model, target = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    if what == "killed":
        _killed(model, target)
    else:
        _together(model, target, "force" in sys.argv)
