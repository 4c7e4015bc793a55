"""Several nodes: torchrun's agents of two nodes, two gloo ranks each, on this machine.

The nodes see different folders, as those without shared storage do; each then has a checkpoint of its own.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from flow import path
from flow_models import make, write_tokenizer
from launch import bare_environment, free_port

for _module in ("megatron.core", "transformers"):
    pytest.importorskip(_module)
if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("needs megatron-bridge", allow_module_level=True)

WORKER = Path(__file__).with_name("nodes_worker.py")
NODES, RANKS = 2, 2


def _torchrun(node: int, port: str, *arguments: str) -> list[str]:
    nodes = [f"--nnodes={NODES}", f"--node-rank={node}", f"--nproc-per-node={RANKS}"]
    meet = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    return [sys.executable, "-m", "torch.distributed.run", *nodes, *meet, str(WORKER), *arguments]


@pytest.mark.timeout(500)
@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo is for machines without a GPU")
@pytest.mark.parametrize("shared", [False, True])
def test_two_nodes_of_two_ranks_under_torchrun(tmp_path: Path, shared: bool) -> None:
    model = tmp_path / "dense"
    make("dense").bfloat16().save_pretrained(model)
    write_tokenizer(model)
    folders = [tmp_path / ("storage" if shared else f"node-{node}") for node in range(NODES)]
    port = str(free_port())
    agents = [
        subprocess.Popen(
            _torchrun(node, port, str(model), str(tmp_path)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=bare_environment()
            | {"PYTHONPATH": path(), "OMP_NUM_THREADS": "1", "MEGASETUP_CHECKPOINT_DIR": str(folders[node])},
        )
        for node in range(NODES)
    ]
    outputs = []
    try:
        for agent in agents:
            outputs.append(agent.communicate(timeout=400)[0])
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(outputs)
    # Converted once by all ranks, or once on each node, which is said.
    assert ("not all machines of this process group share" in "".join(outputs)) is not shared
    for folder in folders:
        (made,) = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
        assert (made / "iter_0000000" / "run_config.yaml").is_file()

    from safetensors.torch import load_file

    expected = load_file(model / "model.safetensors")
    for rank in range(NODES * RANKS):
        facts = json.loads((tmp_path / f"{rank}.json").read_text())
        node, local = divmod(rank, RANKS)
        assert (facts["world"], facts["node"], facts["local_rank"]) == (4, str(node), str(local))
        assert (facts["tensor"], facts["data"], facts["data_size"]) == (local, node, 2)
        assert facts["existed"] is False
        assert Path(facts["path"]).parent == folders[node]
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for name, whole, dimension in [
            ("embedding.word_embeddings.weight", "model.embed_tokens.weight", 0),
            ("decoder.layers.1.mlp.linear_fc2.weight", "model.layers.1.mlp.down_proj.weight", 1),
        ]:
            assert torch.equal(found[name], expected[whole].chunk(2, dimension)[local])
