"""Buffers and shards are Megatron's: counted by hand for a small model, and element by element against its own map."""

import pytest
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range
from planning.architectures import SMALL, SMALL_MOE, configs, provider_of, write
from planning.by_hand import buffer_of, owned_of

from megasetup.planning import ParallelSizes, pretended_world
from megasetup.planning.buffers import StageBuffers, lay_out
from megasetup.planning.shapes import build_chunks, padded_vocabulary, plain_provider


def _stage(provider, gpus, **ddp) -> tuple[list, StageBuffers]:
    plain = plain_provider(provider)
    with pretended_world(ParallelSizes.of(plain, gpus), 0):
        chunks = build_chunks(plain, padded_vocabulary(provider), stage=0, stages=1)
        return chunks, lay_out(chunks, *configs(**ddp), stage=0)


def test_a_small_model_by_hand(tmp_path):
    _, stage = _stage(provider_of(write(tmp_path, SMALL)), 3)
    # Every size but the embedding's (250 x 64) is a multiple of 64 too, so nothing lies between parameters; the end is
    # padded to a multiple of lcm(3, 128) = 384.
    layer = 64 * (64 + 2 * 32) + 128 + 64 * 64 + 3 * 64 * 96 + 2 * 64
    parameters = 250 * 64 + 2 * layer + 64
    (buffer,) = stage.buffers
    assert stage.parameters == parameters
    assert buffer.elements == -(-parameters // 384) * 384
    assert (buffer.parameter_dtype, buffer.gradient_dtype) == (torch.bfloat16, torch.float32)
    assert not buffer.expert
    shares = [int(buffer.owned(shard).sum()) for shard in range(3)]
    assert shares[:2] == [buffer.elements // 3] * 2
    assert sum(shares) == parameters


def test_parameters_start_at_multiples_of_64(tmp_path):
    # Key-value projections of 8 rows: a bias of 64 + 2 * 16 = 96 elements.
    settings = {**SMALL, "head_dim": 16, "num_key_value_heads": 1}
    _, stage = _stage(provider_of(write(tmp_path, settings)), 1)
    (buffer,) = stage.buffers
    assert 96 in (buffer.end - buffer.start).tolist()
    assert (buffer.start % 64 == 0).all()
    assert buffer.elements > stage.parameters
    assert int(buffer.owned(0).sum()) == stage.parameters


@pytest.mark.parametrize("gpus", [2, 6])
@pytest.mark.parametrize("bucket_size", [None, 5_000])
def test_shares_are_those_of_megatron_s_own_map(tmp_path, gpus, bucket_size):
    fields = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    provider = provider_of(write(tmp_path, SMALL_MOE), **fields)
    settings = {"overlap_grad_reduce": bucket_size is not None, "bucket_size": bucket_size}
    (chunk,), stage = _stage(provider, gpus, **settings)
    layout = DistributedOptimizer.compute_full_param_layout(
        list(chunk.parameters()), bucket_size, gpus, configs(**settings)[1], expert_data_parallel_world_size=gpus // 2
    )
    assert len(stage.buffers) == len(layout.layouts) == 2
    for buffer, (key, part) in zip(stage.buffers, layout.layouts.items(), strict=True):
        assert buffer.expert == key.is_expert_parallel
        assert buffer.shards == (gpus // 2 if buffer.expert else gpus)
        assert (len(part.bucket_indices) > 1) == (bucket_size is not None)
        for shard in range(buffer.shards):
            owned = dict.fromkeys(part.param_index_map, 0)
            for start, end in part.bucket_indices:
                size = (end - start) // buffer.shards
                share = Range(start + shard * size, start + (shard + 1) * size)
                found = DistributedOptimizer._build_model_gbuf_param_range_map(part.param_index_map, share, start)
                for parameter, ranges in found.items():
                    owned[parameter] += ranges["param"].size
            assert buffer.owned(shard).tolist() == list(owned.values())


def test_only_the_first_stage_s_first_chunk_is_cut_into_buckets(tmp_path):
    provider = provider_of(write(tmp_path, SMALL))
    plain = plain_provider(provider)
    sizes = ParallelSizes.of(plain, 2)
    with pretended_world(sizes, 0):
        chunks = build_chunks(plain, 256, stage=0, stages=1)
        optimizer, ddp = configs(overlap_grad_reduce=True, bucket_size=5_000)
        first, later = (lay_out(chunks, optimizer, ddp, stage=stage) for stage in (0, 1))
    assert first.buffers[0].shard_start.unique().numel() > 1
    assert later.buffers[0].shard_start.unique().tolist() == [0]


def test_frozen_parameters_lie_in_nobuffer_of(tmp_path):
    provider = provider_of(write(tmp_path, SMALL))
    plain = plain_provider(provider)
    with pretended_world(ParallelSizes.of(plain, 1), 0):
        chunks = build_chunks(plain, 250, stage=0, stages=1)
        chunks[0].module.embedding.word_embeddings.weight.requires_grad = False
        stage = lay_out(chunks, *configs(), stage=0)
    assert stage.frozen_bytes == 250 * 64 * 2
    assert stage.parameters == sum(p.numel() for p in chunks[0].parameters()) - 250 * 64


@pytest.mark.parametrize(
    ("fraction", "offloaded"),
    # While less than the fraction is offloaded, the next one is: so 0.3 takes the first (half of all) and no more.
    [(0.0, [0, 0, 0]), (0.3, [1, 0, 0]), (0.5, [1, 0, 0]), (0.51, [1, 1, 0]), (0.8, [1, 1, 0]), (1.0, [1, 1, 1])],
)
def test_shards_are_offloaded_in_order_until_the_fraction_is_reached(fraction, offloaded):
    found = owned_of(buffer_of([50, 30, 20]), fraction=fraction)
    assert found.elements.tolist() == [50, 30, 20]
    assert found.offloaded.int().tolist() == offloaded


def test_param_groups_come_in_order_and_fp32_parameters_first_in_each():
    sixteen = buffer_of([10, 20, 30], groups=[1, 0, 0])
    wide = buffer_of([1, 2], groups=[0, 1], dtype=torch.float32)
    found = owned_of(sixteen, wide, fraction=1.0)
    assert found.elements.tolist() == [1, 20, 30, 2, 10]
    assert found.sixteen_bit.tolist() == [False, True, True, False, True]


def test_a_rank_has_only_what_lies_in_its_share():
    buffer = buffer_of([50, 30, 20], shards=2)
    assert owned_of(buffer, fraction=1.0, shard=0).elements.tolist() == [50]
    assert owned_of(buffer, fraction=1.0, shard=1).elements.tolist() == [30, 20]


def test_experts_have_an_optimizer_of_their_own():
    dense, experts = buffer_of([40, 60]), buffer_of([7], expert=True)
    assert owned_of(dense, experts, fraction=0.3).offloaded.tolist() == [True, False]
    assert owned_of(dense, experts, fraction=0.3, expert=True).offloaded.tolist() == [True]
    assert owned_of(dense, fraction=1.0, expert=True).elements.tolist() == []


def test_gradients_of_16_bits_are_noticed():
    assert owned_of(buffer_of([4]), fraction=1.0).sixteen_bit_gradient.tolist() == [False]
    assert owned_of(buffer_of([4], gradient=torch.bfloat16), fraction=1.0).sixteen_bit_gradient.tolist() == [True]
