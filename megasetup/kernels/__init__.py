"""The typed Python face of the compiled module, on tensors.

Everything above this folder speaks of tensors; csrc/ speaks of addresses. This is where the one becomes the other, and
where the same functions run in plain torch when the compiled module is absent.
"""

from megasetup.kernels.convert import Comparison, compare, narrow, set_data, widen, widened
from megasetup.kernels.native import (
    NativeStatus,
    get_num_reading_threads,
    get_num_threads,
    native_status,
    set_num_threads,
)
from megasetup.kernels.transfer import ComparisonStats, CopyJob, Transfer, TransferStats

__all__ = [
    "Comparison",
    "ComparisonStats",
    "CopyJob",
    "NativeStatus",
    "Transfer",
    "TransferStats",
    "compare",
    "get_num_reading_threads",
    "get_num_threads",
    "narrow",
    "native_status",
    "set_data",
    "set_num_threads",
    "widen",
    "widened",
]
