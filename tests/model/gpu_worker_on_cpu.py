"""A worker of the GPU tests on a machine without one: python gpu_worker_on_cpu.py WORKER FOLDER.

The CPU stands in for the GPU (cpu_as_gpu.py), Megatron's layers for Transformer Engine's (draft_parts.plain_layers).
"""

from __future__ import annotations

import importlib
import sys
import warnings
from unittest import mock

if __name__ == "__main__":  # (Megatron starts a process of its own while it saves, and that imports this file)
    name = sys.argv.pop(1)
    warnings.simplefilter("ignore")
    from cpu_as_gpu import cpu_as_gpu
    from draft_parts import plain_layers

    from megasetup.model import training

    plain_layers()
    with mock.patch.object(training, "need_gpu"), mock.patch.object(training, "check_supported"), cpu_as_gpu():
        importlib.import_module(name).main()
