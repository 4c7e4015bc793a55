"""Loads checkpoints into Transformer Engine's layers on a GPU and writes what they hold as Hugging Face folders.

python load_worker.py [CHECKPOINT MODEL OUT]...

Bridge itself loads and exports, so that the test compares our way with another one.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from itertools import batched

import torch
import torch.distributed as dist

from megasetup.compat.bridge import import_bridge


def _load(checkpoint: str, model: str, out: str) -> None:
    bridge = import_bridge().AutoBridge.from_hf_pretrained(model)
    # (Bridge's default for the fusion cannot be built without APEX)
    loaded = bridge.load_megatron_model(
        checkpoint, mp_overrides={"gradient_accumulation_fusion": False}, wrap_with_ddp=False
    )
    kinds = {type(module).__name__ for chunk in loaded for module in chunk.modules()}
    print("LAYERS", checkpoint, sorted(kind for kind in kinds if kind.startswith("TE")), flush=True)
    print("DEVICE", {str(parameter.device) for chunk in loaded for parameter in chunk.parameters()}, flush=True)
    bridge.save_hf_pretrained(loaded, out, show_progress=False, strict=True)


def main() -> None:
    warnings.simplefilter("ignore")
    import_bridge()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    import_bridge("megatron.core.parallel_state").initialize_model_parallel()
    import_bridge("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed(0)
    failed = False
    for checkpoint, model, out in batched(sys.argv[1:], 3):
        try:
            _load(checkpoint, model, out)
        except Exception as error:
            # All are tried: which ones fail tells more than the first one does.
            traceback.print_exc()
            print("FAILED", checkpoint, f"{type(error).__name__}: {error}"[:2000], flush=True)
            failed = True
    dist.destroy_process_group()
    sys.exit(failed)


if __name__ == "__main__":
    main()
