"""A process of test_hybrid_resume.py: the resume tests' work on a stand-in for a GPU, with a small vocabulary.

Arguments: "te", as if Transformer Engine were there, or "plain"; then those of resume_cases.main().
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

    import as_if_cuda
    import real_megatron
    import resume_cases
    from megatron.core.optimizer import distrib_optimizer

    from megasetup.compat.write_queue import plain_write_queue

    # Only which of two paths Megatron takes through its checkpoints; the optimizers are torch's in both.
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = sys.argv.pop(1) == "te"
    real_megatron.VOCABULARY = 999
    resume_cases.ASYNCHRONOUS = []
    as_if_cuda.install()
    with plain_write_queue():
        resume_cases.main()
