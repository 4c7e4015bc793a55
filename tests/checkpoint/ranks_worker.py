"""Conversions by the ranks of one process group; NCCL and GPUs where there are enough, gloo and the CPU elsewhere.

python ranks_worker.py together CASES FOLDER
    for each case, KIND:SIZE=N[,SIZE=N...], all ranks convert FOLDER/KIND/hf to FOLDER/KIND/megatron-SIZE...
python ranks_worker.py apart FOLDER
    each rank has a folder of its own, as machines without a shared one have
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megasetup.checkpoint.importing import handle_model_import
from megasetup.checkpoint.nodes import NodeError


def _together(cases: str, folder: Path) -> None:
    from megatron.core import parallel_state

    for case in cases.split(";"):
        kind, _, sizes = case.partition(":")
        megatron_cfg = {name: int(size) for name, size in (pair.split("=") for pair in sizes.split(",") if pair)}
        seen: list[int] = []
        target = folder / kind / f"megatron-{sizes}"
        handle_model_import(
            {"megatron_cfg": megatron_cfg},
            str(folder / kind / "hf"),
            str(target),
            False,
            lambda chunk, seen=seen: seen.append(sum(parameter.numel() for parameter in chunk.parameters())),
        )
        facts = {"case": case, "parameters": seen, "up": parallel_state.model_parallel_is_initialized()}
        print(json.dumps(facts), flush=True)


def _apart(folder: Path) -> None:
    target = folder / f"machine-{dist.get_rank()}" / "megatron"
    try:
        handle_model_import({"megatron_cfg": {}}, str(folder / "hf"), str(target), False)
        print("ANSWER converted", flush=True)
    except NodeError as error:
        print("ANSWER", error, flush=True)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
    logging.getLogger("megatron").setLevel(logging.WARNING)
    gpus = torch.cuda.is_available()
    if gpus:
        torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl" if gpus else "gloo", timeout=datetime.timedelta(seconds=120))
    if sys.argv[1] == "together":
        _together(sys.argv[2], Path(sys.argv[3]))
    else:
        _apart(Path(sys.argv[2]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
