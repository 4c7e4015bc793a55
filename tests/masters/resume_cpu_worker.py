"""A process of test_hybrid_resume.py: the resume tests' work on a stand-in for a GPU, with a small vocabulary.

Arguments: "te", as if Transformer Engine were there, or "plain"; then those of resume_cases.main().
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    tests = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(tests), str(tests / "model")]

    import real_megatron
    import resume_cases
    from cpu_as_gpu import cpu_as_gpu
    from megatron.core.optimizer import distrib_optimizer

    from megasetup.compat.write_queue import plain_write_queue

    # Only which of two paths Megatron takes through its checkpoints; the optimizers are torch's in both.
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = sys.argv.pop(1) == "te"
    real_megatron.DEVICE, real_megatron.VOCABULARY = "cpu", 999
    resume_cases.ASYNCHRONOUS = []
    with cpu_as_gpu(), plain_write_queue():
        resume_cases.main()
