"""Loads a checkpoint into Transformer Engine's layers on a GPU and writes what they hold as a Hugging Face folder.

python load_worker.py CHECKPOINT MODEL OUT

Bridge itself loads and exports, so that the test compares our way with another one.
"""

from __future__ import annotations

import sys
import warnings

import torch
import torch.distributed as dist

from megasetup.compat.bridge import import_bridge


def main() -> None:
    checkpoint, model, out = sys.argv[1:]
    warnings.simplefilter("ignore")
    bridge = import_bridge().AutoBridge.from_hf_pretrained(model)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    import_bridge("megatron.core.parallel_state").initialize_model_parallel()
    import_bridge("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed(0)
    loaded = bridge.load_megatron_model(checkpoint, wrap_with_ddp=False)
    kinds = {type(module).__name__ for chunk in loaded for module in chunk.modules()}
    print("LAYERS", sorted(kind for kind in kinds if kind.startswith("TE")), flush=True)
    print("DEVICE", {str(parameter.device) for chunk in loaded for parameter in chunk.parameters()}, flush=True)
    bridge.save_hf_pretrained(loaded, out, show_progress=False, strict=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
