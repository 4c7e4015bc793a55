"""The schema of a config: every key that setup reads or that trainers' files hold beside it, as TypedDicts.

A key is added in one place: a line here, with its type and a `Key` that says what it does. Validation, 'did you mean'
and docs/config.md follow from it.
"""

from .key import Key, is_open
from .megatron import CheckpointConfig, MegatronConfig, PeftConfig
from .optimizer import DistributedDataParallelConfig, OptimizerConfig, SchedulerConfig
from .performance import Fp8Config
from .policy import DraftConfig, GenerationConfig, PolicyConfig, TrainerConfig, ValueConfig

__all__ = [
    "CheckpointConfig",
    "DistributedDataParallelConfig",
    "DraftConfig",
    "Fp8Config",
    "GenerationConfig",
    "Key",
    "MegatronConfig",
    "OptimizerConfig",
    "PeftConfig",
    "PolicyConfig",
    "SchedulerConfig",
    "TrainerConfig",
    "ValueConfig",
    "is_open",
]
