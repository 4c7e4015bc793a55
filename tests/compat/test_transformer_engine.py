"""The stand-in for Transformer Engine, each test in a process of its own: an import happens once in a process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

_MISSING = importlib.util.find_spec("transformer_engine") is None
_BRIDGE = importlib.metadata.packages_distributions().get("megatron", [])
without = pytest.mark.skipif(
    not _MISSING or "megatron-bridge" not in _BRIDGE,
    reason="needs megatron-bridge, and a machine without Transformer Engine",
)


def _python(code: str, *flags: str, path: Path | None = None) -> str:
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, *flags, "-c", textwrap.dedent(code)],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{path}:{root}" if path else str(root), "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


@without
@pytest.mark.parametrize("flags", [(), ("-O",)])
def test_bridge_imports_without_transformer_engine(flags: tuple[str, ...]) -> None:
    out = _python(
        """
        import importlib.util, logging, sys
        from megasetup.compat.bridge import import_bridge
        from megasetup.compat.transformer_engine import ensure_importable
        logging.basicConfig(stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
        logging.getLogger("megasetup").setLevel(logging.DEBUG)
        bridge = import_bridge()
        from megatron.core.extensions.transformer_engine import HAVE_TE
        from megatron.bridge.peft import lora_layers
        import torch
        print("bridge", bridge.AutoBridge.__name__, "megatron has it", HAVE_TE)
        print("left", [name for name in sys.modules if name.startswith("transformer_engine")])
        print("found", importlib.util.find_spec("transformer_engine"), "cuda", torch.cuda.is_initialized())
        print("again", ensure_importable(), ensure_importable(), import_bridge() is bridge)
        print("finders", sum(type(one).__module__.startswith("megasetup") for one in sys.meta_path))
        print("loader", type(lora_layers.__loader__).__name__, type(lora_layers.__spec__.loader).__name__)
        """,
        *flags,
    )
    assert "bridge AutoBridge megatron has it False" in out
    assert "left []" in out
    assert "found None cuda False" in out
    assert "again True True True" in out
    assert "finders 1" in out
    assert "loader SourceFileLoader SourceFileLoader" in out
    assert "Traceback" not in out
    assert out.count("megasetup DEBUG Transformer Engine is not installed") == 1
    assert "megasetup DEBUG megatron.bridge.peft.lora_layers was imported without" in out


@without
def test_using_the_stand_in_says_what_to_install() -> None:
    out = _python(
        """
        from megasetup.compat.bridge import import_bridge
        te = import_bridge("megatron.bridge.peft.lora_layers").te
        class Child(te.Linear): pass
        for use in (te.Linear, te.ops.Sequential, te.fp8_autocast, Child):
            try:
                use(1, bias=False)
            except ImportError as error:
                print(type(error).__name__, error)
        print(isinstance(3, (te.Linear, te.LayerNormLinear)), te.Linear is te.Linear, hasattr(te, "__wrapped__"))
        """
    )
    assert out.count("TransformerEngineMissingError") == 4
    for name in ("pytorch.Linear", "pytorch.ops.Sequential", "pytorch.fp8_autocast"):
        assert f"transformer_engine.{name} was used, but Transformer Engine is not installed. Install it with" in out
    assert "__main__.Child was used" in out
    assert "False True False" in out


@without
def test_without_it_the_import_fails_as_named() -> None:
    """The version at hand still needs this file: when this fails, the file may go."""
    out = _python(
        """
        try:
            import megatron.bridge
        except ModuleNotFoundError as error:
            print("needs", error.name)
        """
    )
    assert "needs transformer_engine" in out


def test_an_installed_one_is_never_hidden(tmp_path: Path) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('broken: libcudnn.so.9 not found')\n")
    out = _python(
        """
        import sys
        before = list(sys.meta_path)
        from megasetup.compat.transformer_engine import ensure_importable, is_installed
        print("installed", is_installed(), "stand-in", ensure_importable(), sys.meta_path == before)
        try:
            import transformer_engine
        except ImportError as error:
            print(error)
        """,
        path=tmp_path,
    )
    assert "installed True stand-in False True" in out
    assert "broken: libcudnn.so.9 not found" in out


def test_a_stand_in_of_someone_else_is_left_alone() -> None:
    out = _python(
        """
        import sys, types
        other = sys.modules["transformer_engine"] = types.ModuleType("transformer_engine")
        from megasetup.compat.transformer_engine import ensure_importable
        print("stand-in", ensure_importable(), sys.modules["transformer_engine"] is other)
        """
    )
    assert "stand-in False True" in out
