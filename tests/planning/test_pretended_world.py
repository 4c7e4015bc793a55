"""A pretended rank stands where Megatron puts it, and leaves nothing behind."""

import os

import pytest
import torch
from megatron.core import parallel_state

from megasetup.planning import ParallelSizes, PlanningError, places, pretended_world


@pytest.mark.parametrize(
    "sizes",
    [
        ParallelSizes(gpus=16, tensor=2, pipeline=2, context=2, expert=2, expert_tensor=1),
        ParallelSizes(gpus=16, tensor=2, pipeline=2, expert=4, expert_tensor=2),
        ParallelSizes(gpus=8, tensor=2, pipeline=2, expert_tensor=2, pipeline_last=False),
        ParallelSizes(gpus=16, tensor=2, optimizer_instances=2, expert_tensor=2),
        ParallelSizes(gpus=1),
    ],
    ids=["tp pp cp ep", "expert tensor", "pipeline inside data", "two optimizer instances", "one GPU"],
)
def test_places_are_megatron_s(sizes):
    for place in places(sizes):
        with pretended_world(sizes, place.rank):
            shards = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
            expert_shards = parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True)
            assert place == (
                torch.distributed.get_rank(),
                parallel_state.get_pipeline_model_parallel_rank(),
                parallel_state.get_tensor_model_parallel_rank(),
                shards.rank(),
                parallel_state.get_expert_model_parallel_rank(),
                expert_shards.rank(),
            )


def test_by_hand():
    # Ranks 0 and 1 share each tensor, 0..3 are the first stage's two replicas, 4..7 the second stage's.
    found = places(ParallelSizes(gpus=8, tensor=2, pipeline=2, expert_tensor=2))
    assert [place.stage for place in found] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [place.tensor for place in found] == [0, 1] * 4
    assert [place.shard for place in found] == [0, 0, 1, 1] * 2


def test_nothing_is_left(monkeypatch):
    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
    monkeypatch.delenv("NVTE_FUSED_ATTN", raising=False)
    with pretended_world(ParallelSizes(gpus=4), 3):
        os.environ["NVTE_FLASH_ATTN"] = os.environ["NVTE_FUSED_ATTN"] = "0"
        assert torch.distributed.get_world_size() == 4
    assert not torch.distributed.is_initialized()
    assert not parallel_state.is_initialized()
    assert os.environ["NVTE_FLASH_ATTN"] == "1"
    assert "NVTE_FUSED_ATTN" not in os.environ
    assert not torch.cuda.is_initialized()


def test_nothing_is_left_after_an_error():
    with pytest.raises(KeyError), pretended_world(ParallelSizes(gpus=4), 0):
        raise KeyError
    assert not torch.distributed.is_initialized()


def test_a_rank_of_a_real_run_is_refused(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="a process of its own"), pretended_world(ParallelSizes(gpus=2), 0):
            pass
        assert torch.distributed.get_world_size() == 1
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (ParallelSizes(gpus=12, tensor=8), r"12 GPUs.*groups of 8 .*a multiple of 8"),
        (ParallelSizes(gpus=8, expert=16), r"8 GPUs.*groups of 16 .*expert 16"),
        (ParallelSizes(gpus=0), "gpus is 0"),
        (ParallelSizes(gpus=8, optimizer_instances=3), "num_distributed_optimizer_instances is 3"),
    ],
)
def test_sizes_that_do_not_divide(sizes, said):
    with pytest.raises(PlanningError, match=said):
        places(sizes)
