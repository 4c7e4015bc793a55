"""Which FP32 copies a Megatron optimizer keeps of each weight, and where they lie.

This is the only file that knows Megatron's private names. It reads an optimizer and returns plain data: each weight's
shard in the model, the copies of it level by level, and what was left out and why. tests/masters/test_megatron_names.py
pins the names read here against the installed Megatron, so that a rename fails there and not on a cluster.

Level 1 is the FP32 shard on the weight's own device, level 2 the CPU clone that the CPU sub-optimizer steps, level 3
the hybrid optimizer's FP32 working copy. Which of them exist depends on the mode. Standard: level 1 is the hybrid
optimizer's parameter and level 2 its clone. Precision-aware: there is no level 1, the hybrid optimizer's parameter is
the 16-bit shard itself; level 3 is its working copy, and for an offloaded weight levels 2 and 3 are the same tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch

Level = Literal[1, 2, 3]
Levels = Literal["offloaded", "all"]

ACCEPTED = (
    "a Megatron optimizer: DistributedOptimizer, ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer, "
    "or a bare HybridDeviceOptimizer"
)

_ADRIFT = "the optimizer steps memory that this parameter no longer lies in, so its updates will not reach the model"
_NOT_STEPPED = (
    "it has neither a main parameter nor a copy, and the optimizer does not step its shard: nothing was refreshed, and "
    "training will leave it as it is; build the optimizer again from this model"
)


class WeightCopies(NamedTuple):
    """One weight of the model and its copies.

    Attributes:
        label: the weight's name, or an object whose str() is it. Megatron names are looked up only when first shown:
            walking a large model for them takes longer than planning its copies.
        source: this rank's shard of the weight: contiguous bfloat16, float16 or float32, on any device. For a
            quantised weight it is the FP32 main parameter, since the model holds no memory to widen.
        levels: (level, copy) pairs; a copy is contiguous, float32 or the source's dtype, with as many elements.
        offset: where the shard starts in the whole parameter, in elements.
        quantised: the model holds this weight in a quantised form, so level 1 is what it was loaded into.
        note: something that a reader of the report should know about this weight, or "".
    """

    label: object
    source: torch.Tensor
    levels: tuple[tuple[Level, torch.Tensor], ...]
    offset: int = 0
    quantised: bool = False
    note: str = ""

    @property
    def name(self) -> str:
        return str(self.label)


class Untouched(NamedTuple):
    """Something that the optimizer holds and that is not refreshed, with the reason."""

    what: str
    reason: str


class Anchor(NamedTuple):
    """An attribute that the copies were read from, with what it held then.

    Megatron replaces these objects at times (HybridDeviceOptimizer makes new clones in load_state_dict). Comparing
    identities tells that a plan has lost touch with its optimizer.
    """

    holder: Any
    attribute: str
    members: tuple[object, ...]

    @classmethod
    def at(cls, holder: Any, attribute: str) -> Anchor:
        return cls(holder, attribute, tuple(_members(getattr(holder, attribute))))

    def holds(self) -> bool:
        """Whether the attribute still holds the very same objects."""
        now = tuple(_members(getattr(self.holder, self.attribute, None)))
        return len(now) == len(self.members) and all(map(operator.is_, now, self.members))

    def __str__(self) -> str:
        return f"{type(self.holder).__name__}.{self.attribute}"


@dataclass
class Layout:
    """Everything that was read from one optimizer.

    Attributes:
        copies: the weights and their copies.
        parameters: the model parameters that the sources are shards of; quantised ones are left out.
        anchors: what must not change while a plan made from this is in use.
        untouched: what is not refreshed, and why.
        quantised: labels of the quantised weights; they have copies here only where level 2 mirrors level 1.
        problems: what makes a weight unusable, to be reported with the plan's own findings.
    """

    copies: list[WeightCopies] = field(default_factory=list)
    parameters: list[torch.Tensor] = field(default_factory=list)
    anchors: list[Anchor] = field(default_factory=list)
    untouched: list[Untouched] = field(default_factory=list)
    quantised: list[object] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_layout(optimizer: Any, model: Any = None, *, levels: Levels = "offloaded") -> Layout:
    """Read the copies that an optimizer keeps.

    Args:
        optimizer: see ACCEPTED; chains may be nested.
        model: the model's chunks, a module or a sequence of modules, for the weights' names. Default: the chunks that
            the optimizer knows.
        levels: "offloaded" reads sub-optimizers that have a hybrid optimizer; "all" also reads level 1 of the others.

    Raises:
        TypeError: the optimizer, or one within a chain, is of another type; or the model is.
        ValueError: `levels` is neither of the two.
    """
    if levels not in ("offloaded", "all"):
        raise ValueError(f'levels is {levels!r}: it must be "offloaded" or "all"')
    reader = _Reader(levels == "all", _ParameterNames(_chunks_of(model)))
    reader.read(optimizer, "optimizer")
    return reader.layout


def _chunks_of(model: Any) -> list[torch.nn.Module]:
    if model is None:
        return []
    chunks = [model] if isinstance(model, torch.nn.Module) else model
    if not isinstance(chunks, Sequence) or not all(isinstance(chunk, torch.nn.Module) for chunk in chunks):
        raise TypeError(f"model is a {type(model).__name__}: a torch.nn.Module or a sequence of them is needed")
    return list(chunks)


def _members(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        # Keys too: a clone that is held for another parameter than before is as lost as one that was replaced.
        return chain(value.keys(), value.values())
    if isinstance(value, list):
        return chain.from_iterable(map(_members, value)) if value and isinstance(value[0], list) else value
    return (value,)


class _ParameterNames:
    """Names of parameters in the model's chunks, looked up when the first one is asked for."""

    def __init__(self, chunks: list[torch.nn.Module]) -> None:
        self._given = bool(chunks)
        self._chunks = chunks
        self._names: dict[int, str] | None = None

    def learn(self, chunks: Iterable[torch.nn.Module]) -> None:
        """Add chunks that an optimizer knows, unless the caller gave the model."""
        if not self._given:
            self._chunks += [chunk for chunk in chunks if all(chunk is not known for known in self._chunks)]

    def get(self, parameter: torch.Tensor) -> str | None:
        if self._names is None:
            several = len(self._chunks) > 1
            self._names = {
                id(held): f"chunk{index}.{name}" if several else name
                for index, chunk in enumerate(self._chunks)
                for name, held in chunk.named_parameters()
            }
        return self._names.get(id(parameter))


class _ParameterName:
    """A parameter's name, looked up when shown."""

    __slots__ = ("_names", "_otherwise", "_parameter")

    def __init__(self, names: _ParameterNames, parameter: torch.Tensor, otherwise: tuple[str, int, int]) -> None:
        self._names = names
        self._parameter = parameter
        self._otherwise = otherwise

    def __str__(self) -> str:
        name = self._names.get(self._parameter)
        if name is not None:
            return name
        what, number, group = self._otherwise
        return f"{what} {number} of group {group}"


class _HybridCopies:
    """Levels 2 and 3 of a hybrid optimizer's parameters, each to be claimed by the weight that it belongs to."""

    def __init__(self, hybrid: Any) -> None:
        self._hybrid = hybrid
        # By id, since hashing a tensor costs a call into Python.
        self._clones: dict[int, torch.Tensor] = {}
        self._working_copies: dict[int, torch.Tensor] = {}
        if hybrid is not None:
            self._clones = {id(held): clone for held, clone in hybrid.gpu_params_map_cpu_copy.items()}
            self._working_copies = {id(held): copy for held, copy in hybrid.param_to_fp32_param.items()}

    def claim(self, parameter: torch.Tensor | None) -> tuple[tuple[Level, torch.Tensor], ...]:
        """The copies of one of the hybrid optimizer's parameters, handed out once."""
        clone = self._clones.pop(id(parameter), None)
        working_copy = self._working_copies.pop(id(parameter), None)
        if working_copy is None:
            return () if clone is None else ((2, clone),)
        return ((3, working_copy),) if clone is None else ((2, clone), (3, working_copy))

    def orphans(self) -> list[str]:
        """What nobody claimed, as problems."""
        if not self._clones and not self._working_copies:
            return []
        places = _places_in(self._hybrid)
        return [
            f"{name} holds a copy of shape {tuple(copy.shape)} for "
            f"{places.get(key, 'a tensor that is in none of its param_groups')}, which is no weight of this optimizer, "
            "so it would not be refreshed: build the optimizer again from this model; if that does not help, report "
            "this with the version of Megatron"
            for name, left in (
                ("gpu_params_map_cpu_copy", self._clones),
                ("param_to_fp32_param", self._working_copies),
            )
            for key, copy in left.items()
        ]


def _places_in(optimizer: Any) -> dict[int, str]:
    """Where each parameter stands in a torch optimizer's groups, by the parameter's id."""
    return {
        id(parameter): f"parameter {number} of its param group {group}"
        for group, settings in enumerate(optimizer.param_groups)
        for number, parameter in enumerate(settings["params"])
    }


class _Reader:
    """Walks an optimizer and fills one Layout."""

    def __init__(self, all_levels: bool, names: _ParameterNames) -> None:
        # Imported here: megatron takes seconds to import, and people who plan from tensors do not need it.
        from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
        from megatron.core.optimizer.optimizer import (
            ChainedOptimizer,
            Float16OptimizerWithFloat16Params,
            FP32Optimizer,
        )

        self.layout = Layout()
        self._all_levels = all_levels
        self._names = names
        self._plain_types: dict[type, bool] = {}
        self._hybrid_type = HybridDeviceOptimizer
        self._readers = (
            (ChainedOptimizer, self._read_chain),
            (DistributedOptimizer, self._read_distributed),
            (Float16OptimizerWithFloat16Params, self._read_float16),
            (FP32Optimizer, self._read_fp32),
            (HybridDeviceOptimizer, self._read_hybrid),
        )

    def read(self, optimizer: Any, path: str) -> None:
        for kind, read in self._readers:
            if isinstance(optimizer, kind):
                self._names.learn(getattr(optimizer, "model_chunks", ()))
                read(optimizer, path)
                return
        raise TypeError(f"{path} is a {type(optimizer).__module__}.{type(optimizer).__qualname__}: pass {ACCEPTED}")

    def _leave(self, optimizer: Any, path: str, reason: str) -> None:
        self.layout.untouched.append(Untouched(f"{path} ({type(optimizer).__name__})", reason))

    def _anchor(self, holder: Any, *attributes: str) -> None:
        self.layout.anchors += [Anchor.at(holder, attribute) for attribute in attributes]

    def _label(self, parameter: torch.Tensor, path: str, what: str, number: int, group: int) -> _ParameterName:
        where = f"{path}: {what}" if "[" in path else what
        return _ParameterName(self._names, parameter, (where, number, group))

    def _is_stub(self, optimizer: Any, path: str) -> bool:
        if not optimizer.is_stub_optimizer and optimizer.optimizer is not None:
            return False
        self._leave(optimizer, path, "a stub: this rank trains none of its parameters, so there is no copy")
        return True

    def _read_chain(self, optimizer: Any, path: str) -> None:
        self._anchor(optimizer, "chained_optimizers")
        for index, part in enumerate(optimizer.chained_optimizers):
            self.read(part, f"{path}.chained_optimizers[{index}]")

    def _read_distributed(self, optimizer: Any, path: str) -> None:
        if self._is_stub(optimizer, path):
            return
        if optimizer.ddp_config.use_megatron_fsdp:
            self._leave(optimizer, path, "Megatron-FSDP keeps the main weights itself and refreshes them on loading")
            return
        hybrid = optimizer.optimizer if isinstance(optimizer.optimizer, self._hybrid_type) else None
        if hybrid is None:
            mains = list(chain.from_iterable(optimizer.shard_fp32_from_float16_groups))
            if mains and all(main is None for main in mains):
                self._leave(
                    optimizer,
                    path,
                    "precision-aware without CPU offload: the masters lie in the fused optimizer's own state "
                    "(master_param), which it makes from the weights on its first step",
                )
                return
            if not self._all_levels:
                self._leave_without_hybrid(optimizer, path)
                return
        self._anchor(
            optimizer,
            "optimizer",
            "model_float16_groups",
            "shard_float16_groups",
            "shard_fp32_from_float16_groups",
            "model_fp32_groups",
            "shard_fp32_groups",
        )
        copies = self._copies_in(hybrid)
        stepped: dict[int, str] | None = None
        for group, (models, shards, mains) in enumerate(
            zip(
                optimizer.model_float16_groups,
                optimizer.shard_float16_groups,
                optimizer.shard_fp32_from_float16_groups,
                strict=True,
            )
        ):
            for number, (parameter, shard, main) in enumerate(zip(models, shards, mains, strict=True)):
                label = self._label(parameter, path, "parameter", number, group)
                held = copies.claim(shard if main is None else main)
                if not self._is_plain(parameter):
                    self._add_quantised(label, main, held)
                    continue
                source, offset, viewed = self._shard(optimizer, parameter, shard, label)
                if source is None:
                    continue
                if main is not None:
                    self._add(label, parameter, source, ((1, main), *held), offset)
                    continue
                note = "" if viewed else _ADRIFT
                if not held:  # as it should be only for a shard that is stepped in its own dtype
                    stepped = _places_in(optimizer.optimizer) if stepped is None else stepped
                    note = note if id(shard) in stepped else _NOT_STEPPED
                self._add(label, parameter, source, held, offset, note)
        for group, (models, shards) in enumerate(
            zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True)
        ):
            for number, (parameter, shard) in enumerate(zip(models, shards, strict=True)):
                label = self._label(parameter, path, "FP32 parameter", number, group)
                held = copies.claim(shard)
                source, offset, viewed = self._shard(optimizer, parameter, shard, label)
                if source is not None:
                    self._add(label, parameter, source, ((1, shard), *held), offset, "" if viewed else _ADRIFT)
        self._refuse_orphans(copies, path)

    def _read_float16(self, optimizer: Any, path: str) -> None:
        if self._is_stub(optimizer, path):
            return
        if isinstance(optimizer.optimizer, self._hybrid_type):
            self._leave(
                optimizer,
                path,
                "a HybridDeviceOptimizer without the distributed optimizer: Megatron swaps its parameters after the "
                "clones are made, and its step fails; set use_distributed_optimizer",
            )
            return
        if not self._all_levels:
            self._leave_without_hybrid(optimizer, path)
            return
        self._anchor(optimizer, "optimizer", "float16_groups", "fp32_from_float16_groups")
        for group, (models, mains) in enumerate(
            zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
        ):
            for number, (parameter, main) in enumerate(zip(models, mains, strict=True)):
                label = self._label(parameter, path, "parameter", number, group)
                if not self._is_plain(parameter):
                    self.layout.quantised.append(label)
                    continue
                source = self._flat(parameter, label)
                if source is not None:
                    self._add(label, parameter, source, ((1, main),))

    def _read_fp32(self, optimizer: Any, path: str) -> None:
        if self._is_stub(optimizer, path):
            return
        if isinstance(optimizer.optimizer, self._hybrid_type):
            self._anchor(optimizer, "optimizer")
            self._read_hybrid(optimizer.optimizer, path)
        else:
            self._leave(optimizer, path, "it steps the model's own FP32 parameters: there is no other copy")

    def _read_hybrid(self, hybrid: Any, path: str) -> None:
        """A hybrid optimizer whose parameters are the model's own."""
        copies = self._copies_in(hybrid)
        for group, settings in enumerate(hybrid.param_groups):
            for number, parameter in enumerate(settings["params"]):
                label = self._label(parameter, path, "parameter", number, group)
                held = copies.claim(parameter)
                if not self._is_plain(parameter):
                    self._add_quantised(label, None, held)
                    continue
                source = self._flat(parameter, label)
                if source is not None:
                    self._add(label, parameter, source, held)
        self._refuse_orphans(copies, path)

    def _leave_without_hybrid(self, optimizer: Any, path: str) -> None:
        self._leave(
            optimizer,
            path,
            "no HybridDeviceOptimizer, so nothing is offloaded: its reload_model_params() refreshes level 1, "
            'as does levels="all"',
        )

    def _copies_in(self, hybrid: Any) -> _HybridCopies:
        if hybrid is not None:
            self._anchor(hybrid, "gpu_params_map_cpu_copy", "param_to_fp32_param")
        return _HybridCopies(hybrid)

    def _refuse_orphans(self, copies: _HybridCopies, path: str) -> None:
        """Copies that no weight claimed would stay as they are, and the next step would train from them."""
        self.layout.problems += [f"{path}: {orphan}" for orphan in copies.orphans()]

    def _is_plain(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter is ordinary memory. Quantised tensors are subclasses that answer torch themselves."""
        kind = type(parameter)
        plain = self._plain_types.get(kind)
        if plain is None:
            plain = kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
            self._plain_types[kind] = plain
        return plain

    def _flat(self, parameter: torch.Tensor, label: object) -> torch.Tensor | None:
        if parameter.is_contiguous():
            return parameter.detach().view(-1)
        self.layout.problems.append(
            f"{label}: the model parameter of shape {tuple(parameter.shape)} and strides {parameter.stride()} is not "
            "contiguous: make it so (parameter.data = parameter.data.contiguous()) before planning"
        )
        return None

    def _shard(
        self, optimizer: Any, parameter: torch.Tensor, shard: torch.Tensor | None, label: object
    ) -> tuple[torch.Tensor | None, int, bool]:
        """This rank's flat view of a parameter, its offset, and whether Megatron's own view is that memory.

        Megatron's view is taken where it can be, as making one costs more than all other reading. The parameter is the
        truth, though: its data may have been bound to other memory since.
        """
        span = optimizer._get_model_param_range_map(parameter)["param"]
        start, end = span.start, span.end
        if (
            shard is not None
            and shard.data_ptr() == parameter.data_ptr() + start * parameter.element_size()
            and shard.dtype == parameter.dtype
            and shard.device == parameter.device
            and shard.numel() == end - start
            and parameter.is_contiguous()
        ):
            return (shard.detach() if shard.requires_grad else shard), start, True
        flat = self._flat(parameter, label)
        return (None if flat is None else flat[start:end]), start, False

    def _add(
        self,
        label: object,
        parameter: torch.Tensor,
        source: torch.Tensor,
        levels: tuple[tuple[Level, torch.Tensor], ...],
        offset: int = 0,
        note: str = "",
    ) -> None:
        self.layout.copies.append(WeightCopies(label, source, levels, offset, False, note))
        self.layout.parameters.append(parameter)

    def _add_quantised(
        self, label: object, main: torch.Tensor | None, held: tuple[tuple[Level, torch.Tensor], ...]
    ) -> None:
        self.layout.quantised.append(label)
        if not held:
            return
        if main is None:
            reason = "quantised and without a main parameter, so there is nothing to refresh its copies from"
            self.layout.untouched.append(Untouched(str(label), reason))
        else:
            self.layout.copies.append(WeightCopies(label, main.detach().view(-1), held, 0, True))
