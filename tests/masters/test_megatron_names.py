"""The private Megatron names that layout.py reads and hybrid.py takes over, pinned against the installed source.

Only the source is read, so it runs without a GPU. When one of these fails, Megatron has renamed or dropped something:
masters/layout.py must follow, or masters/hybrid.py with compat/hybrid_optimizer.py and hybrid_checkpoints.py.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)

from megasetup.masters import hybrid, layout

NAMES = {
    DistributedOptimizer: {
        "optimizer",
        "is_stub_optimizer",
        "ddp_config",
        "model_chunks",
        "model_float16_groups",
        "shard_float16_groups",
        "shard_fp32_from_float16_groups",
        "model_fp32_groups",
        "shard_fp32_groups",
    },
    ChainedOptimizer: {"chained_optimizers", "model_chunks"},
    Float16OptimizerWithFloat16Params: {
        "optimizer",
        "is_stub_optimizer",
        "float16_groups",
        "fp32_from_float16_groups",
    },
    FP32Optimizer: {"optimizer", "is_stub_optimizer"},
    HybridDeviceOptimizer: {"gpu_params_map_cpu_copy", "param_to_fp32_param"},
}


def assigned_on_self(kind: type) -> set[str]:
    """Every `self.name = ...` in the class and the Megatron classes that it derives from."""
    names = set()
    for base in kind.__mro__:
        if base.__module__.startswith("megatron."):
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
                is_store = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                if is_store and isinstance(node.value, ast.Name) and node.value.id == "self":
                    names.add(node.attr)
    return names


@pytest.mark.parametrize("kind", NAMES, ids=lambda kind: kind.__name__)
def test_attributes_are_still_set(kind: type) -> None:
    assert NAMES[kind] - assigned_on_self(kind) == set()


def test_the_list_is_what_layout_reads() -> None:
    # What stands above must not fall behind the file that it guards.
    known = set().union(*NAMES.values()) | {"param_groups", "use_megatron_fsdp", "_get_model_param_range_map"}
    roots = {"optimizer", "hybrid", "part"}
    read = {
        node.attr
        for node in ast.walk(ast.parse(Path(layout.__file__).read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in roots
    }
    assert read <= known
    assert {"shard_fp32_from_float16_groups", "gpu_params_map_cpu_copy", "chained_optimizers"} <= read


def test_no_other_file_of_masters_knows_them() -> None:
    private = set().union(*NAMES.values()) - {"optimizer", "model_chunks"}
    for path in Path(layout.__file__).parent.glob("*.py"):
        if path.name not in ("layout.py", "hybrid.py"):  # the second is the subclass that has these attributes
            assert not {name for name in private if name in path.read_text()}, path.name


def test_shard_ranges() -> None:
    source = inspect.getsource(DistributedOptimizer._build_model_gbuf_param_range_map)
    assert '"param": sub_param_range' in source
    assert (Range(3, 7).start, Range(3, 7).end) == (3, 7)
    assert list(inspect.signature(DistributedOptimizer._get_model_param_range_map).parameters) == ["self", "param"]


def test_fsdp_switch_and_class_tree() -> None:
    assert DistributedDataParallelConfig().use_megatron_fsdp is False
    assert issubclass(LayerWiseDistributedOptimizer, ChainedOptimizer)
    for kind in (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer, ChainedOptimizer):
        assert issubclass(kind, MegatronOptimizer)
    # The checks go in this order, so none of these may derive from an earlier one.
    assert not issubclass(DistributedOptimizer, (ChainedOptimizer, Float16OptimizerWithFloat16Params))
    assert not issubclass(HybridDeviceOptimizer, MegatronOptimizer)


def test_load_state_dict_makes_new_clones() -> None:
    # Why a plan compares identities before it writes.
    source = inspect.getsource(HybridDeviceOptimizer)
    assert "self._init_sub_optimizers()" in source.split("def post_load_state_dict_hook")[1]


def test_our_hybrid_optimizer_sets_what_the_stock_one_sets() -> None:
    own = {"_arenas", "_buckets", "_homes", "_lanes", "_moments", "_populating"}
    assert hybrid._MADE_WITH_THE_HOST_SIDE - own == assigned_on_self(HybridDeviceOptimizer) - {
        "offload_fraction",
        "cpu_optimizer_cls",
        "gpu_optimizer_cls",
        "pin_cpu_grads",
        "pin_cpu_params",
        "overlap_cpu_optimizer_d2h_h2d",
        "param_update_in_fp32",
        "sub_optimizer_kwargs",
        "state",
        "_cpu_optimizer_map_data_event",  # only the stock class's own step and the hooks it registers read it
    }


def test_the_methods_that_ours_replaces() -> None:
    constructor = inspect.getsource(HybridDeviceOptimizer.__init__)
    for name in ("_init_sub_optimizers", "_register_load_state_dict_hooks"):
        assert f"self.{name}()" in constructor
        assert name in vars(hybrid.PipelinedHybridOptimizer)
    step = inspect.getsource(HybridDeviceOptimizer.step)
    for name in ("_sync_hdo_param_groups_to_sub_optimizers", "_sync_sub_optimizers_state_to_hdo"):
        assert f"self.{name}()" in step
        assert inspect.signature(getattr(HybridDeviceOptimizer, name)).parameters.keys() == {"self"}


def test_where_megatron_constructs_the_hybrid_optimizer() -> None:
    # Twice, and the second time over the groups of the first one's settings.
    source = inspect.getsource(DistributedOptimizer.__init__)
    assert source.count("HybridDeviceOptimizer(") == 1
    assert "**self.optimizer.defaults" in source


def test_what_compat_repairs_is_still_broken() -> None:
    sync = "_sync_hdo_state_to_sub_optimizers()"
    for name in ("fully_reshardable", "fs_model_space"):
        assert sync in inspect.getsource(getattr(DistributedOptimizer, f"load_parameter_state_from_{name}"))
    for name in ("dp_zero", "dp_reshardable"):
        assert sync not in inspect.getsource(getattr(DistributedOptimizer, f"load_parameter_state_from_{name}"))
    setter = inspect.getsource(DistributedOptimizer._set_main_param_and_optimizer_states)
    assert "isinstance(tensors[key], torch.Tensor)" in setter
    sharded = inspect.signature(DistributedOptimizer.sharded_state_dict).parameters
    assert list(sharded)[:3] == ["self", "model_sharded_state_dict", "is_loading"]
    assert "self.optimizer.dummy_step()" in inspect.getsource(DistributedOptimizer.load_state_dict)
