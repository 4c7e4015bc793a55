"""Import and export on this machine's CPU, in this process: real models, real Bridge, real checkpoints on disk."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_models import KINDS, OTHERS, assert_same_bits, bits, make

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")

import yaml
from megatron.core import parallel_state, rerun_state_machine
from megatron.core.tensor_parallel import random as tensor_parallel_random

from megasetup.checkpoint import converting
from megasetup.checkpoint.exporting import export_model_to_hf
from megasetup.checkpoint.importing import handle_model_import, import_model_from_hf
from megasetup.checkpoint.marks import MARK, what_is_missing
from megasetup.checkpoint.paths import validate_model_paths
from megasetup.checkpoint.safety import UnsafeCheckpointError
from megasetup.compat.bridge import import_bridge
from megasetup.config.provider import provider_from_checkpoint

Converted = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """A model of each kind and its checkpoint, converted when first asked for."""
    done: dict[str, tuple[Path, Path]] = {}

    def get(kind: str) -> tuple[Path, Path]:
        if kind not in done:
            folder = tmp_path_factory.mktemp(kind)
            model = make(kind, folder / "hf")
            assert import_model_from_hf(str(model), folder / "megatron") is True
            done[kind] = (model, folder / "megatron")
        return done[kind]

    return get


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_every_tensor_comes_back_bit_for_bit(kind: str, converted: Converted, tmp_path: Path) -> None:
    model, checkpoint = converted(kind)
    assert what_is_missing(checkpoint) is None
    assert export_model_to_hf(checkpoint, tmp_path / "back") == checkpoint / "iter_0000000"
    assert_same_bits(model, tmp_path / "back")
    was, now = (json.loads((folder / "config.json").read_text()) for folder in (model, tmp_path / "back"))
    assert now == was
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["back"]


def test_the_checkpoint_says_nothing_of_the_machine_that_made_it(converted: Converted) -> None:
    _, checkpoint = converted("moe")
    written = yaml.safe_load((checkpoint / "iter_0000000" / "run_config.yaml").read_text())
    assert written["checkpoint"]["save"] == str(checkpoint)
    saved = written["model"]
    assert saved["transformer_layer_spec"]["_target_"].endswith("gpt_provider.default_layer_spec")
    assert saved["transformer_impl"] == "transformer_engine"
    assert saved["moe_token_dispatcher_type"] == "alltoall"
    assert saved["moe_grouped_gemm"] is True
    assert saved["moe_permute_fusion"] is True
    assert saved["use_cpu_initialization"] is False
    assert saved["expert_tensor_parallel_size"] is None
    assert "gradient_accumulation_fusion" not in saved
    provider = provider_from_checkpoint(str(checkpoint), rank=0)
    assert (provider.num_moe_experts, provider.tensor_model_parallel_size) == (4, 1)
    assert provider.share_embeddings_and_output_weights is False


_NORMS = {
    "dense": ["self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"],
    "moe": ["self_attention.linear_qkv.layer_norm_weight", "pre_mlp_layernorm.weight"],
    "mixed": [
        "0.self_attention.linear_qkv.layer_norm_weight",
        "0.mlp.linear_fc1.layer_norm_weight",
        "1.self_attention.linear_qkv.layer_norm_weight",
        "1.pre_mlp_layernorm.weight",
        "mtp.layers.0.transformer_layer.self_attention.linear_qkv.layer_norm_weight",
        "mtp.layers.0.transformer_layer.pre_mlp_layernorm.weight",
    ],
    "latent": [
        "0.input_layernorm.weight",
        "0.self_attention.linear_q_up_proj.layer_norm_weight",
        "0.self_attention.linear_kv_up_proj.layer_norm_weight",
        "0.mlp.linear_fc1.layer_norm_weight",
        "1.pre_mlp_layernorm.weight",
    ],
}


@pytest.mark.parametrize("kind", _NORMS)
def test_tensors_have_the_names_of_transformer_engines_layers(kind: str, converted: Converted) -> None:
    """The GPU tests load them into those; here the names that differ between the two kinds of layers are looked at."""
    from torch.distributed.checkpoint import FileSystemReader

    _, checkpoint = converted(kind)
    names = FileSystemReader(checkpoint / "iter_0000000").read_metadata().state_dict_metadata
    norms = {name.removeprefix("decoder.layers.") for name in names if "norm" in name}
    assert norms >= set(_NORMS[kind])
    fused = {"input_layernorm.weight", "0.pre_mlp_layernorm.weight", "1.mlp.linear_fc1.layer_norm_weight"}
    assert not norms & fused
    assert not any(".q_layernorm" in name or ".kv_layernorm" in name for name in norms if kind == "latent")
    assert not any(".local_experts." in name for name in names)
    # Transformer Engine's norms have an extra state each, those that it fuses that of the linear layer.
    assert "decoder.final_layernorm._extra_state/shard_0_1" in names
    alone = {name.removesuffix(".weight") for name in norms if name.endswith("norm.weight")}
    with_state = {name.partition("._extra_state")[0] for name in norms if "_extra_state" in name}
    assert with_state == alone


def test_a_spec_that_bridge_chose_for_this_machine_is_saved_for_others(converted: Converted, tmp_path: Path) -> None:
    _, checkpoint = converted("mixed")
    written = yaml.safe_load((checkpoint / "iter_0000000" / "run_config.yaml").read_text())
    assert written["model"]["transformer_layer_spec"]["use_transformer_engine"] is True


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    model = make("dense", tmp_path / "hf")
    torch.manual_seed(3)
    functions = ("current_device", "synchronize", "get_rng_state")
    before = (torch.get_rng_state(), random.getstate(), dict(os.environ), [getattr(torch.cuda, f) for f in functions])
    handlers = logging.getLogger().handlers[:]

    assert import_model_from_hf(str(model), tmp_path / "megatron")

    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert dict(os.environ) == before[2]
    assert [getattr(torch.cuda, f) for f in functions] == before[3]
    assert logging.getLogger().handlers == handlers
    assert not dist.is_initialized()
    assert not parallel_state.model_parallel_is_initialized()
    assert rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE is None
    assert tensor_parallel_random._CUDA_RNG_STATE_TRACKER is None
    assert tensor_parallel_random._CUDA_RNG_STATE_TRACKER_INITIALIZED is False
    assert torch.cuda.is_initialized() is False
    assert not multiprocessing.active_children()
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert names == [".megatron.lock", "hf", "megatron"]


def test_it_is_converted_once_and_again_only_by_force(converted: Converted, tmp_path: Path) -> None:
    model, checkpoint = converted("dense")
    identity = json.loads((checkpoint / MARK).read_text())["identity"]
    assert import_model_from_hf(str(model), checkpoint) is False
    assert json.loads((checkpoint / MARK).read_text())["identity"] == identity
    assert import_model_from_hf(str(model), checkpoint, force=True) is True
    assert json.loads((checkpoint / MARK).read_text())["identity"] != identity
    assert what_is_missing(checkpoint) is None
    assert not list(checkpoint.parent.glob("*importing*"))


def test_a_half_written_checkpoint_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make("dense", tmp_path / "hf")
    (tmp_path / "megatron" / "iter_0000000").mkdir(parents=True)
    (tmp_path / "megatron" / "iter_0000000" / "__0_0.distcp").write_bytes(b"half")
    with caplog.at_level(logging.WARNING, logger="megasetup"):
        assert import_model_from_hf(str(model), tmp_path / "megatron") is True
    assert "is not a whole checkpoint and will be replaced" in caplog.text
    export_model_to_hf(tmp_path / "megatron", tmp_path / "back")
    assert_same_bits(model, tmp_path / "back")


@pytest.mark.parametrize("what", ["a file", "another folder", "the model itself"])
@pytest.mark.parametrize("force", [False, True])
def test_what_is_no_checkpoint_is_never_replaced(tmp_path: Path, what: str, force: bool) -> None:
    model = make("dense", tmp_path / "hf")
    target = model if what == "the model itself" else tmp_path / "mine"
    if what == "a file":
        target.write_text("mine")
    elif what == "another folder":
        (target / "iter_0000000").mkdir(parents=True)
        (target / "notes.txt").write_text("mine")
    kept = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(FileExistsError, match=r"is not a converted checkpoint: it (is a file|holds \S+)\. It would"):
        import_model_from_hf(str(model), target, force=force)
    kept_now = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file() and file.suffix != ".lock"}
    assert kept_now == kept


@pytest.mark.parametrize("name", ["./nope", "/nope", "empty"])
def test_a_model_that_is_not_there_is_known_at_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=rf"the model is '{name}': must be a"):
        import_model_from_hf(name, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["empty"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    model = make("dense", tmp_path / "hf")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file") as raised:
        import_model_from_hf(str(model), tmp_path / "file" / "below")
    assert raised.value.__notes__ == [
        f"megasetup: nothing can be written to {tmp_path / 'file'}: choose a folder where it can"
    ]


def test_the_hook_sees_loaded_weights_and_what_it_changes_is_saved(tmp_path: Path) -> None:
    model = make("dense", tmp_path / "hf")
    seen: list[torch.Tensor] = []

    def hook(chunk: Any) -> None:
        weight = dict(chunk.named_parameters())["module.decoder.final_layernorm.weight"]
        seen.append(weight.detach().clone())
        weight.data.fill_(0.5)

    config = {"model_name": str(model), "precision": "bfloat16", "megatron_cfg": {"tensor_model_parallel_size": 8}}
    handle_model_import(config, str(model), str(tmp_path / "megatron"), False, hook)
    assert len(seen) == 1
    assert torch.equal(seen[0].view(torch.int16), bits(model)["model.norm.weight"][1])
    export_model_to_hf(tmp_path / "megatron", tmp_path / "back")
    was, now = bits(model), bits(tmp_path / "back")
    assert [name for name in was if not torch.equal(was[name][1], now[name][1])] == ["model.norm.weight"]
    assert now["model.norm.weight"][1].view(torch.bfloat16).unique().tolist() == [0.5]


def test_a_layer_spec_of_the_callers(tmp_path: Path) -> None:
    gpt_provider = import_bridge("megatron.bridge.models.gpt_provider")
    called: list[str] = []

    def spec(provider: Any) -> Any:
        called.append(type(provider).__name__)
        return gpt_provider.local_layer_spec(provider)

    # A function of a test cannot be written into run_config.yaml by name, so the conversion is looked at, not its end.
    conversion = converting.Conversion("unused", transformer_layer_spec=spec)
    provider = SimpleNamespace(transformer_layer_spec=None)
    converting._override_specs(provider, conversion)
    assert provider.transformer_layer_spec is spec
    model = make("dense", tmp_path / "hf")
    assert import_model_from_hf(str(model), tmp_path / "m", transformer_layer_spec=gpt_provider.local_layer_spec)
    written = yaml.safe_load((tmp_path / "m" / "iter_0000000" / "run_config.yaml").read_text())
    assert written["model"]["transformer_layer_spec"]["_target_"].endswith("gpt_provider.local_layer_spec")


@pytest.mark.parametrize("field", ["hybrid_stack_spec", "mamba_stack_spec"])
def test_a_stack_spec_goes_to_the_field_of_either_name(field: str) -> None:
    """Providers are stand-ins: Mamba layers need a GPU."""
    provider = SimpleNamespace(**{field: "the provider's"})
    converting._override_specs(provider, converting.Conversion("unused", hybrid_stack_spec="ours"))
    assert vars(provider) == {field: "ours"}


def test_a_stack_spec_for_a_model_without_mamba_layers(converted: Converted, tmp_path: Path) -> None:
    model, _ = converted("dense")
    with pytest.raises(ValueError, match="GPTModelProvider has neither hybrid_stack_spec nor mamba_stack_spec"):
        handle_model_import({"megatron_cfg": {}}, str(model), str(tmp_path / "m"), False, None, None, object())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".m.lock"]


@pytest.mark.parametrize(
    ("config", "exists"),
    [
        ({"pretrained_checkpoint": {"path": "/x", "format": "megatron_bridge"}}, True),
        ({"pretrained_checkpoint": {"path": "/x", "format": "megatron_lm"}}, False),
        (
            {
                "pretrained_checkpoint": {"path": "/x", "format": "megatron_lm"},
                "megatron_cfg": {"force_reconvert_from_hf": True},
            },
            True,
        ),
        ({"megatron_cfg": {}}, True),
        ({"megatron_cfg": {"force_reconvert_from_hf": False}, "pretrained_checkpoint": None}, True),
    ],
)
def test_nothing_to_do(config: dict[str, Any], exists: bool, tmp_path: Path) -> None:
    handle_model_import(config, "no/such-model", str(tmp_path / "m"), exists)
    assert not list(tmp_path.iterdir())


def test_force_and_overrides_come_from_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converted: Converted
) -> None:
    model, _ = converted("dense")
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(tmp_path))
    config: dict[str, Any] = {
        "model_name": str(model),
        "hf_config_overrides": {"max_position_embeddings": 77},
        "megatron_cfg": {"force_reconvert_from_hf": True},
    }
    name, path, exists = validate_model_paths(config)
    assert exists is False
    handle_model_import(config, name, path, exists)
    assert validate_model_paths(config) == (name, path, True)
    assert provider_from_checkpoint(path, rank=0).seq_length == 77
    first = json.loads((Path(path) / MARK).read_text())
    assert first["hf_config_overrides"] == {"max_position_embeddings": 77}
    handle_model_import(config, name, path, True)
    assert json.loads((Path(path) / MARK).read_text())["identity"] != first["identity"]
    # (and the way back takes them from the checkpoint)
    export_model_to_hf(path, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["max_position_embeddings"] == 77
    assert_same_bits(model, tmp_path / "back")


def test_a_model_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises((OSError, ValueError), match="no-such-model"):
        import_model_from_hf(str(tmp_path / "no-such-model"), tmp_path / "m")
    assert not list(tmp_path.iterdir())
    assert not dist.is_initialized()


def test_parallel_state_of_someone_else(tmp_path: Path, converted: Converted) -> None:
    model, _ = converted("dense")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        with pytest.raises(RuntimeError, match=r"while Megatron's parallel state is up"):
            import_model_from_hf(str(model), tmp_path / "m")
        assert parallel_state.model_parallel_is_initialized()
        parallel_state.destroy_model_parallel()
        assert import_model_from_hf(str(model), tmp_path / "m") is True
        assert dist.is_initialized()
        with pytest.raises(RuntimeError, match="one process alone"):
            export_model_to_hf(tmp_path / "m", tmp_path / "back")
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


_REMOTE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
Path({marker!r}).touch()
from transformers import Qwen3Config
class OwnConfig(Qwen3Config):
    model_type = "own"
"""


def test_code_of_a_model_runs_only_when_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import transformers.dynamic_module_utils

    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    marker = tmp_path / "ran"
    model = make("dense", tmp_path / "hf")
    (model / "own.py").write_text(_REMOTE.format(marker=str(marker)))
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (model / "config.json").write_text(json.dumps(config))

    policy: dict[str, Any] = {"megatron_cfg": {}}
    with pytest.raises(ValueError, match="trust_remote_code") as error:
        handle_model_import(policy, str(model), str(tmp_path / "m"), False)
    assert any("policy.megatron_cfg.trust_remote_code: true" in note for note in error.value.__notes__)
    assert not marker.exists()

    policy["megatron_cfg"]["trust_remote_code"] = True
    try:
        handle_model_import(policy, str(model), str(tmp_path / "m"), False)
    finally:
        assert marker.exists()


def test_export_does_not_write_over_anything(converted: Converted, tmp_path: Path) -> None:
    _, checkpoint = converted("dense")
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="back exists and is not empty"):
        export_model_to_hf(checkpoint, tmp_path / "back")
    assert (tmp_path / "back" / "notes.txt").read_text() == "mine"


def test_export_of_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is no folder of a checkpoint"):
        export_model_to_hf(tmp_path / "no", tmp_path / "back")
    with pytest.raises(FileNotFoundError, match=r"neither run_config\.yaml nor an iteration"):
        export_model_to_hf(tmp_path, tmp_path / "back")


def _copy(checkpoint: Path, target: Path) -> Path:
    import shutil

    shutil.copytree(checkpoint, target)
    return target


def test_export_of_a_copy_that_broke_off(converted: Converted, tmp_path: Path) -> None:
    copy = _copy(converted("dense")[1], tmp_path / "copy")
    (copy / "iter_0000000" / "__0_0.distcp").unlink()
    with pytest.raises(FileNotFoundError, match=r"__0_0\.distcp is missing and should have"):
        export_model_to_hf(copy, tmp_path / "back")


def test_a_checkpoint_of_an_older_bridge_is_explained(converted: Converted, tmp_path: Path) -> None:
    copy = _copy(converted("dense")[1], tmp_path / "copy")
    (copy / MARK).unlink()
    config = copy / "iter_0000000" / "run_config.yaml"
    config.write_text(config.read_text().replace("gpt_provider.GPTModelProvider", "gpt_provider.OldProvider"))
    with pytest.raises(Exception, match="OldProvider") as error:
        export_model_to_hf(copy, tmp_path / "back")
    assert any("an older Megatron-Bridge" in note for note in error.value.__notes__)


class _Runs:
    """Unpickles by making a file: what a hostile index would do, and worse."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self._marker),))


def test_an_index_that_runs_code_is_refused_unread(converted: Converted, tmp_path: Path) -> None:
    import pickle

    copy = _copy(converted("dense")[1], tmp_path / "copy")
    (copy / MARK).unlink()
    index = copy / "iter_0000000" / ".metadata"
    index.write_bytes(pickle.dumps(_Runs(tmp_path / "ran")))
    with pytest.raises(UnsafeCheckpointError, match=r"asks for posix\.mkdir"):
        export_model_to_hf(copy, tmp_path / "back")
    assert not (tmp_path / "ran").exists()
    index.write_bytes(b"\x80\x04garbage")
    with pytest.raises(UnsafeCheckpointError, match="cannot be read as the index"):
        export_model_to_hf(copy, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_source_model_that_moved(tmp_path: Path, converted: Converted) -> None:
    model = make("dense", tmp_path / "hf")
    import_model_from_hf(str(model), tmp_path / "m")
    model.rename(tmp_path / "elsewhere")
    with pytest.raises(Exception, match="hf") as error:
        export_model_to_hf(tmp_path / "m", tmp_path / "back")
    assert "(--model)" in str(error.value)
    export_model_to_hf(tmp_path / "m", tmp_path / "back", hf_model_name=str(tmp_path / "elsewhere"))
    assert_same_bits(tmp_path / "elsewhere", tmp_path / "back")


def test_export_as_another_kind_of_model(tmp_path: Path, converted: Converted) -> None:
    _, checkpoint = converted("dense")
    other = make("moe", tmp_path / "moe")
    with pytest.raises(ValueError, match=rf"not those of a model like {other}: name one of its kind \(--model\)"):
        export_model_to_hf(checkpoint, tmp_path / "back", hf_model_name=str(other))
    assert [entry.name for entry in tmp_path.iterdir()] == ["moe"]
