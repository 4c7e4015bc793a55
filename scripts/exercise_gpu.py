"""Runs every GPU kernel and every way of the pipeline once, on little data: what scripts/sanitize_gpu.sh watches.

The values are checked too, so that a sanitizer that hides a kernel's failure does not hide it from this script.
"""

import torch

from megasetup import kernels
from megasetup.kernels import CopyJob, Transfer

LENGTHS = (0, 1, 7, 64, 1000, 4099, 70_001)


def main() -> None:
    device = torch.device("cuda", 0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        lows = [torch.randn(n + 3, device=device).to(dtype)[n % 3 :][:n] for n in LENGTHS]
        highs = [torch.empty(n + 2, device=device)[n % 2 :][:n] for n in LENGTHS]
        kernels.widen(lows, highs)
        assert all(torch.equal(low.float(), high) for low, high in zip(lows, highs, strict=True))
        assert all(found.exact_differences == 0 for found in kernels.compare(lows, highs))
        backs = [torch.empty_like(low) for low in lows]
        kernels.narrow(highs, backs)
        assert all(torch.equal(low, back) for low, back in zip(lows, backs, strict=True))
        jobs = [
            CopyJob(low, torch.zeros_like(high) if n % 2 else None, place)
            for n, low, high in zip(LENGTHS, lows, highs, strict=True)
            for place in (torch.zeros(n), torch.zeros(n, pin_memory=True), None)
        ]
        for threads in (1, 2):
            kernels.set_num_threads(threads)
            transfer = Transfer(jobs, device, chunk_elements=4096)
            for target in (target for job in jobs for target in job[1:] if target is not None):
                target.zero_()
            stale = transfer.compare()
            transfer.run()
            fresh = transfer.compare()
            assert any(side is not None and side.exact_differences for pair in stale for side in pair)
            assert all(side is None or side.exact_differences == 0 for pair in fresh for side in pair)
    many = [torch.randn(256, device=device).bfloat16() for _ in range(200)]
    assert all(torch.equal(low.float(), high) for low, high in zip(many, kernels.widened(many), strict=True))
    print("every kernel ran, and its values are right")


main()
