"""One rank of test_failure.py: python failure_worker.py CASE. Prints its result as the last line."""

from __future__ import annotations

import logging
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from megasetup.model.failure import PeerFailedError
from megasetup.model.stages import Stages


def main() -> None:
    (case,) = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    rank = dist.get_rank()
    start = time.monotonic()
    try:
        with Stages("setup", grace=3.0) as stages:
            with stages.stage("first", "nothing"):
                dist.barrier()
            with stages.stage("second", "mount the folder") as stage:
                stage.bytes = 1000
                if case in ("fails", "blocked", "exits") and rank == 1:
                    if case == "exits":
                        sys.exit(3)
                    raise FileNotFoundError("/nowhere")
                if case == "blocked" and rank == 0:
                    dist.distributed_c10d._get_default_store().get("never set")
                if case == "fails" and rank == 2:
                    time.sleep(2)  # at work on its own: it hears of it at the end of the stage
                else:
                    dist.all_reduce(torch.ones(3))
            if case == "last" and rank == 1:
                with stages.stage("third", "try again"):
                    raise ValueError("only here")
        with Stages("setup") as again, again.stage("after", "nothing"):
            dist.barrier()
    except PeerFailedError as error:
        print(f"peer: {error}; after {time.monotonic() - start:.0f} s; {error.failure.rank}")
    except (FileNotFoundError, ValueError, RuntimeError) as error:
        print(f"own: {type(error).__name__}; {error.__notes__[-1]}")
        time.sleep(6)  # as a Ray actor stays alive after its method raised
    else:
        print(stages.report)
        print("slowest:", [entry.slowest_rank in (0, 1, 2) for entry in stages.report.stages])


if __name__ == "__main__":
    main()
