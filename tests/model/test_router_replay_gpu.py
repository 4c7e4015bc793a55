"""Routes followed on GPUs, through Transformer Engine's layers: one GPU, then every way to split a model over two."""

from __future__ import annotations

import pytest
from router_replay_layouts import EXPERT, PIPELINE, SEQUENCE, SEQUENCE_EXPERT, check_layouts

pytest.importorskip("megatron.core")


@pytest.mark.gpu
def test_one_gpu() -> None:
    check_layouts(1, "cuda", [{}])


@pytest.mark.multigpu
def test_two_gpus() -> None:
    check_layouts(2, "cuda", [EXPERT, PIPELINE, SEQUENCE, SEQUENCE_EXPERT])
