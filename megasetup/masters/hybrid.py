"""PipelinedHybridOptimizer: Megatron's HybridDeviceOptimizer, made and stepped fast, with the same results bit for bit.

The parameters that the stock class would offload are offloaded, each sub-optimizer class gets the settings that it
would get, and every attribute that Megatron reads is there with its meaning. What differs: the host memory comes from
two arenas (hybrid_memory.py), and while one bucket, some parameters or a slice of a long one (hybrid_slices.py), is
stepped, the wire moves others (hybrid_buckets.py, hybrid_traffic.py), whether or not overlap was asked for. Gradients
pass through a few buffers, so cpu_copy_map_grad, which only the stock step reads, has nothing to show and stays empty.

The host side is made when it is first needed, because DistributedOptimizer constructs its hybrid optimizer twice and
throws the first away: over whole parameters, then over this rank's shards. compat/hybrid_optimizer.py makes the second
at once, where a user expects to wait.

Faults of the stock class in megatron-core 0.19 that are not repeated here:
- A state dict loads also where a parameter is natively FP32, and in standard mode (KeyError).
- While it loads, the state of offloaded parameters stays on the host (it goes through the GPU, 12 bytes an element).
- A load that fails leaves the param groups as they were.
- A parameter without a gradient is not stepped (it is stepped again from its last gradient).
- After a load the GPU optimizer goes on counting its steps (it is set back to the loaded count before every step).
- Tensors that an asynchronous checkpoint's writer moved into shared memory are brought back before the next step (they
  stay unpinned, and are written while they are stepped; compat/async_save.py hands the writer copies).
- The GPU optimizer waits for the FP32 gradients that it reads (with overlap they are made on another stream).
- Shards of natively FP32 parameters may be made while gradients are enabled ("can't optimize a non-leaf Tensor").
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

from megasetup import kernels
from megasetup.masters import hybrid_buckets, hybrid_memory
from megasetup.masters.hybrid_slices import MOMENTS, SlicedMaster
from megasetup.masters.hybrid_traffic import (
    Bucket,
    HostLane,
    Lane,
    Row,
    WireLane,
    can_be_cut,
    gradient_of,
    staging_for,
)

_logger = logging.getLogger("megasetup")
_CPU = torch.device("cpu")
# What the stock constructor sets and ours sets when the host side is made.
_MADE_WITH_THE_HOST_SIDE = frozenset(
    {
        "cpu_param_groups",
        "gpu_param_groups",
        "gpu_params_map_cpu_copy",
        "cpu_copys_map_gpu_param",
        "param_to_fp32_param",
        "fp32_param_to_orig_param",
        "param_to_inner_param",
        "inner_param_to_orig_param",
        "cpu_optimizers",
        "gpu_optimizer",
        "cpu_copy_map_grad",
        "_arenas",
        "_buckets",
        "_homes",
        "_lanes",
        "_sliced",
        "_moments",
        "_populating",
        "_used_moments",
        "_d2h_stream",
        "_h2d_stream",
    }
)


class PipelinedHybridOptimizer(HybridDeviceOptimizer):  # type: ignore[misc]  # Megatron is untyped
    """Steps a share of the parameters on the host, with traffic and CPU optimizer overlapped.

    Takes what HybridDeviceOptimizer takes. Parameters that lie on the host themselves are stepped there too, as the
    stock class means to.

    Raises:
        ArenaError: (when the host side is made, or at the first step) the host memory cannot be had or pinned.
    """

    # Elements; a benchmark may try others.
    bucket_elements: ClassVar[int] = hybrid_buckets.BUCKET_ELEMENTS
    chunk_elements: ClassVar[int] = hybrid_buckets.CHUNK_ELEMENTS
    buckets_ahead: ClassVar[int] = hybrid_buckets.BUCKETS_AHEAD
    _has_told = False

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        params = list(params)
        for param in _tensors_of(params):
            if param.requires_grad and not param.is_leaf:
                # A view of a parameter. torch lets only leaves into an optimizer, or what keeps its gradient.
                param.retain_grad()
        super().__init__(params, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Only for what is not there (yet).
        if name in _MADE_WITH_THE_HOST_SIDE and "param_groups" in self.__dict__:
            self.make()
            return self.__dict__[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _init_sub_optimizers(self) -> None:
        """The stock constructor's call; see the file's first paragraph."""

    @property
    def is_made(self) -> bool:
        """Whether the host side has been made."""
        return "_buckets" in self.__dict__

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that are pinned for it; 0 before the host side is made."""
        arenas = self._arenas if self.is_made else ()
        return sum(arena.nbytes for arena in arenas if arena.is_pinned)

    @torch.no_grad()
    def make(self) -> None:
        """Make the clones, fill them from the parameters, and make all else that a step needs; again, if it was made.

        Raises:
            ArenaError: the host memory cannot be had or pinned.
        """
        if self.is_made:  # let the old memory go first
            self._populating.stop()
            for name in _MADE_WITH_THE_HOST_SIDE:
                self.__dict__.pop(name, None)
        self.__dict__.update(_made(self))

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """One step of every sub-optimizer; parameters on a GPU are written by the time that its current stream is."""
        self._sync_hdo_param_groups_to_sub_optimizers()
        buckets: list[Bucket] = self._buckets
        lanes: list[Lane] = self._lanes
        arrived: dict[Bucket, torch.cuda.Event | None] = {}
        waiting = iter(buckets)

        def fetch_next() -> None:
            bucket = next(waiting, None)
            if bucket is not None:
                gradients = [gradient_of(row.param) for row in bucket.rows]
                arrived[bucket] = bucket.lane.fetch(bucket, gradients)
                self._give(bucket, gradients)

        with torch.no_grad():
            self._bring_back()
            sliced = self._begin_slices()
            for lane in lanes:
                lane.begin()
        try:
            with torch.no_grad():
                for _ in range(self.buckets_ahead):
                    fetch_next()
            if self.gpu_optimizer is not None:
                self._step_on_gpu(closure)
            self._populating.wait()
            for bucket in buckets:
                with torch.no_grad():
                    fetch_next()
                event = arrived.pop(bucket)
                if event is not None:
                    event.synchronize()
                if bucket.sliced is None:
                    bucket.optimizer.step(closure)
                else:
                    bucket.sliced.step(bucket.rows[0].stepped)
                with torch.no_grad():
                    for row in bucket.rows:
                        if row.grad is not None:
                            row.stepped.grad = None  # the buffer is another bucket's now
                    bucket.lane.send(bucket)
        finally:
            for lane in lanes:
                lane.end()
        with torch.no_grad():
            for one in sliced:
                one.end()
        self._sync_sub_optimizers_state_to_hdo()

    def _bring_back(self) -> None:
        """Bring masters and moments back that were moved since the last step: buckets step and send what lies there."""
        left = [home for home in self._homes if home.is_left]
        for home in left:
            home.bring_back()
        if left and not self._has_told:
            self._has_told = True
            _logger.warning(
                "%d masters and moments of the CPU optimizer had been moved out of their memory and were brought back, "
                "which takes time and memory whenever it happens: torch.multiprocessing moves what it sends to shared "
                "memory; send clones",
                len(left),
            )

    def _begin_slices(self) -> list[SlicedMaster]:
        """Prepare those sliced masters that have a gradient."""
        begun = []
        for param, sliced in self._sliced.items():
            if gradient_of(param) is not None:
                self._begin_state(sliced.optimizer, self.param_to_inner_param[param])
                sliced.begin()
                begun.append(sliced)
        return begun

    def _give(self, bucket: Bucket, gradients: Sequence[torch.Tensor | None]) -> None:
        """Attach the gradients to what is stepped, and Adam's moments where it would now make its own."""
        for row, gradient in zip(bucket.rows, gradients, strict=True):
            stepped = row.stepped
            if gradient is None:
                stepped.grad = None
                continue
            if row.grad is not None:
                stepped.grad = row.grad
            elif gradient is not stepped.grad:
                stepped.grad = gradient.to(stepped.dtype)
            if bucket.sliced is None:
                self._begin_state(bucket.optimizer, row.master)

    def _begin_state(self, optimizer: torch.optim.Optimizer, master: torch.Tensor) -> None:
        """As torch's Adam begins, with moments in the memory that was made for them."""
        moments = self._moments.get(master)
        if moments is None or optimizer.state[master]:
            return
        settings = optimizer.param_groups[0]
        on_device = settings["capturable"] or settings["fused"]
        step = torch.zeros((), dtype=torch.float32) if on_device else torch.tensor(0.0)
        if master in self._used_moments:
            for moment in moments.values():
                moment.zero_()
        self._used_moments.add(master)
        optimizer.state[master].update(step=step, **moments)

    def _step_on_gpu(self, closure: Callable[[], Any] | None) -> None:
        widened = [
            (param, master)
            for param, master in self.param_to_fp32_param.items()
            if master.is_cuda and param not in self.gpu_params_map_cpu_copy
        ]
        for param, master in widened:
            gradient = gradient_of(param)
            master.grad = None if gradient is None else gradient.to(master.dtype)
        self.gpu_optimizer.step(closure)
        with torch.no_grad():
            _convert(kernels.narrow, [(master, param.detach()) for param, master in widened])
        for _, master in widened:
            master.grad = None

    @torch.no_grad()
    def update_fp32_param_by_new_param(self) -> None:
        """Write the parameters' values into their FP32 copies, those on the host through the engine."""
        _fill(list(self.param_to_fp32_param.items()))

    def _sync_hdo_param_groups_to_sub_optimizers(self) -> None:
        """Settings (learning rate and so on) go to the sub-optimizers; their counts of steps stay their own."""
        self._sync_settings(("params", "step"))

    def _sync_settings(self, keep: Sequence[str]) -> None:
        group_of = {self.param_to_inner_param[param]: group for group in self.param_groups for param in group["params"]}
        for optimizer in self.sub_optimizers:
            for group in optimizer.param_groups:
                source = group_of[group["params"][0]]
                group.update({key: value for key, value in source.items() if key not in keep})

    def _register_load_state_dict_hooks(self) -> None:
        # torch casts loaded state to the dtype and device of the parameters that it finds in the groups, so it must
        # find what the sub-optimizers step.
        def before(hybrid: PipelinedHybridOptimizer, state_dict: dict[str, Any]) -> None:
            if hybrid.is_made or state_dict["state"]:
                hybrid._exchange(hybrid.param_to_inner_param)

        def after(hybrid: PipelinedHybridOptimizer) -> None:
            if hybrid.is_made:
                hybrid._take_loaded_state()

        self.register_load_state_dict_pre_hook(before)
        self.register_load_state_dict_post_hook(after)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what state_dict() gave, of this class or of the stock one.

        Raises:
            ValueError: the groups are not those of this optimizer, which stays as it is.
        """
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            if self.is_made:
                self._exchange(self.inner_param_to_orig_param)
            raise

    def _exchange(self, other: dict[torch.Tensor, torch.Tensor]) -> None:
        for group in self.param_groups:
            group["params"][:] = [other.get(param, param) for param in group["params"]]

    def _take_loaded_state(self) -> None:
        self._exchange(self.inner_param_to_orig_param)
        original = self.inner_param_to_orig_param
        self.state: dict[torch.Tensor, dict[str, Any]] = defaultdict(
            dict, {original.get(inner, inner): entry for inner, entry in self.state.items()}
        )
        if any(param not in self.param_to_inner_param for param in _tensors_of(self.param_groups)):
            self.make()  # Float16OptimizerWithFloat16Params changes the parameters and then loads
        self._sync_settings(("params",))
        self._adopt_state(lambda param, master, saved: saved is None)

    def _sync_hdo_state_to_sub_optimizers(self) -> None:
        """Megatron calls this when it has put loaded values into `state` and into the parameters."""
        # In standard mode what it loaded is the parameter itself, FP32 on the GPU; the clone follows.
        self._adopt_state(lambda param, master, saved: param.dtype == master.dtype)

    @torch.no_grad()
    def _adopt_state(self, from_param: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], bool]) -> None:
        """Hand `state` to the sub-optimizers, its values in the memory that was made for them.

        A master is taken from the state where that holds another tensor than the master itself; otherwise from the
        parameter if from_param(parameter, master, the state's master) says so.
        """
        refreshed = []
        for optimizer in self.sub_optimizers:
            state: dict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
            for master in [master for group in optimizer.param_groups for master in group["params"]]:
                param = self.inner_param_to_orig_param[master]
                entry = self.state.get(param, {})
                saved = entry.get("master_param")
                if saved is not None and saved.data_ptr() != master.data_ptr():
                    master.copy_(saved.view(master.shape))
                    entry["master_param"] = master
                elif master is not param and from_param(param, master, saved):
                    refreshed.append((param, master))
                if entry:
                    self._adopt_moments(master, entry)
                    state[master] = entry
            optimizer.state = state
        _fill(refreshed)

    def _adopt_moments(self, master: torch.Tensor, entry: dict[str, Any]) -> None:
        places = self._moments.get(master, {})
        for key, value in entry.items():
            if key == "master_param" or not isinstance(value, torch.Tensor):
                continue
            place = places.get(key)
            if place is None:
                entry[key] = value.to(master.device)
            elif place.data_ptr() != value.data_ptr():
                self._used_moments.add(master)
                entry[key] = place.copy_(value.view(place.shape))


def _tensors_of(params: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors of what an optimizer is given: tensors, (name, tensor) pairs or groups."""
    found: list[torch.Tensor] = []
    for item in params:
        held = item["params"] if isinstance(item, dict) else [item]
        for one in [held] if isinstance(held, torch.Tensor) else held:
            found.append(one[1] if isinstance(one, tuple) else one)
    return found


def _convert(
    kernel: Callable[[list[torch.Tensor], list[torch.Tensor]], None], pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """kernels.widen or narrow over (source, target) pairs of one device; torch copies what they cannot."""
    sources, targets = [], []
    for source, target in pairs:
        low, high = (source, target) if kernel is kernels.widen else (target, source)
        if can_be_cut(low, high):
            sources.append(source)
            targets.append(target)
        else:
            target.copy_(source)
    kernel(sources, targets)


def _fill(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write parameters into their masters, wherever each lies."""
    jobs: dict[torch.device, list[kernels.CopyJob]] = defaultdict(list)
    on_host = []
    for param, master in pairs:
        source = param.detach()
        if source.is_cuda and can_be_cut(source, master):
            near = master.device == source.device
            jobs[source.device].append(kernels.CopyJob(source, master if near else None, None if near else master))
        elif source.is_cuda or master.is_cuda:
            master.copy_(source)
        else:
            on_host.append((source, master))
    for device, of_device in jobs.items():
        kernels.Transfer(of_device, device).run()
    _convert(kernels.widen, on_host)


@dataclass(frozen=True, eq=False)
class _OnHost:
    """A parameter that the CPU optimizer steps, and what its bucket must be alike in."""

    param: torch.Tensor
    dtype: torch.dtype
    group: int
    is_copied: bool

    @property
    def kind(self) -> tuple[int, torch.device, torch.dtype, bool]:
        return (self.group, self.param.device, self.dtype, self.is_copied)


def _made(hybrid: PipelinedHybridOptimizer) -> dict[str, Any]:
    """The attributes of a hybrid optimizer's host side, and of its GPU side where that has FP32 copies."""
    on_host, copied_on_gpu = _chosen(hybrid)
    masters: dict[torch.Tensor, torch.Tensor] = {
        param: torch.empty_like(param, dtype=torch.float32, requires_grad=False) for param in copied_on_gpu
    }
    made = _make_buckets(hybrid, on_host)
    buckets = made.buckets
    masters.update({row.param: row.master for bucket in buckets for row in bucket.rows})
    _fill([(param, master) for param, master in masters.items() if master is not param])

    params = _tensors_of(hybrid.param_groups)
    inner = {param: masters.get(param, param) for param in params}
    original = {master: param for param, master in inner.items()}
    clones = {param: inner[param] for param in params if param.is_cuda and not inner[param].is_cuda}
    fp32 = {param: inner[param] for param in params if hybrid.param_update_in_fp32 and param.dtype != torch.float32}
    groups = [
        [
            {**group, "params": kept}
            for group in hybrid.param_groups
            if (kept := [inner[param] for param in group["params"] if inner[param].is_cuda == cuda])
        ]
        for cuda in (False, True)
    ]
    lanes = list({id(bucket.lane): bucket.lane for bucket in buckets}.values())
    wires = [lane for lane in lanes if isinstance(lane, WireLane)]
    return {
        "cpu_param_groups": groups[0],
        "gpu_param_groups": groups[1],
        "gpu_params_map_cpu_copy": clones,
        "cpu_copys_map_gpu_param": {clone: param for param, clone in clones.items()},
        "param_to_fp32_param": fp32,
        "fp32_param_to_orig_param": {master: param for param, master in fp32.items()},
        "param_to_inner_param": inner,
        "inner_param_to_orig_param": original,
        "cpu_optimizers": list(dict.fromkeys(bucket.optimizer for bucket in buckets)),
        "gpu_optimizer": hybrid.gpu_optimizer_cls(groups[1]) if groups[1] else None,
        "cpu_copy_map_grad": {},
        "_arenas": made.memory.arenas,
        "_buckets": buckets,
        "_homes": made.memory.homes,
        "_lanes": lanes,
        "_sliced": {bucket.rows[0].param: bucket.sliced for bucket in buckets if bucket.sliced is not None},
        "_moments": made.moments,
        "_populating": made.memory.populating,
        "_used_moments": set(),
        "_d2h_stream": wires[0].to_host if wires else None,
        "_h2d_stream": wires[0].to_device if wires else None,
    }


def _chosen(hybrid: PipelinedHybridOptimizer) -> tuple[list[_OnHost], list[torch.Tensor]]:
    """Which parameters are stepped on the host, and which of the others have an FP32 copy; chosen as Megatron does.

    In the groups' order, until the fraction of all elements on GPUs is reached.
    """
    params = _tensors_of(hybrid.param_groups)
    threshold = sum(param.numel() for param in params if param.is_cuda) * hybrid.offload_fraction
    offloaded = 0
    on_host, copied_on_gpu = [], []
    for index, group in enumerate(hybrid.param_groups):
        for param in group["params"]:
            widened = hybrid.param_update_in_fp32 and param.dtype != torch.float32
            is_offloaded = param.is_cuda and offloaded < threshold
            if is_offloaded:
                offloaded += param.numel()
            if is_offloaded or not param.is_cuda:
                dtype = torch.float32 if widened else param.dtype
                on_host.append(_OnHost(param, dtype, index, is_offloaded or widened))
            elif widened:
                copied_on_gpu.append(param)
    return on_host, copied_on_gpu


class _Run(NamedTuple):
    """What is stepped at a time, still without memory: a sub-optimizer's parameters, or elements of its only one."""

    holder: int
    elements: int
    slice: tuple[int, int] | None


class _Made(NamedTuple):
    """Buckets in the order of a step, their masters still to be filled; the moments' memory by master."""

    buckets: list[Bucket]
    moments: dict[torch.Tensor, dict[str, torch.Tensor]]
    memory: hybrid_memory.HostMemory


def _runs(hybrid: PipelinedHybridOptimizer, holders: Sequence[Sequence[_OnHost]]) -> list[_Run]:
    runs = []
    sliceable = _has_moments(hybrid)
    for holder, members in enumerate(holders):
        elements = sum(entry.param.numel() for entry in members)
        first = members[0]
        if (
            sliceable
            and elements > hybrid.bucket_elements
            and first.is_copied
            and first.dtype == torch.float32
            and first.param.is_contiguous()
            and hybrid.param_groups[first.group].get("fused")
        ):
            runs += [
                _Run(holder, last - start, (start, last))
                for start, last in hybrid_buckets.slices(elements, hybrid.bucket_elements)
            ]
        else:
            runs.append(_Run(holder, elements, None))
    return hybrid_buckets.large_in_the_middle(runs, lambda run: run.elements)


def _make_buckets(hybrid: PipelinedHybridOptimizer, on_host: Sequence[_OnHost]) -> _Made:
    kinds: dict[tuple[int, torch.device, torch.dtype, bool], list[_OnHost]] = defaultdict(list)
    for entry in on_host:
        kinds[entry.kind].append(entry)
    # One sub-optimizer each.
    holders = [
        [entries[index] for index in indices]
        for entries in kinds.values()
        for indices in hybrid_buckets.group([entry.param.numel() for entry in entries], hybrid.bucket_elements)
    ]
    demands = [
        hybrid_memory.Demand(tuple(entry.param.shape for entry in members), members[0].dtype)
        if members[0].is_copied
        else hybrid_memory.Demand((), members[0].dtype)
        for members in holders
    ]
    runs = _runs(hybrid, holders)
    # A bucket's buffer is free again when it has been stepped; until then the next ones are fetched.
    ring = [0] * (hybrid.buckets_ahead + 1)
    for index, run in enumerate(runs):
        elements = demands[run.holder].places.elements if run.slice is None else run.elements
        slot = index % len(ring)
        ring[slot] = max(ring[slot], elements * demands[run.holder].dtype.itemsize)
    devices = [entry.param.device for entry in on_host if entry.param.is_cuda]
    memory = hybrid_memory.allocate(
        demands,
        ring,
        devices[0] if devices else _CPU,
        pin_masters=hybrid.pin_cpu_params,
        pin_grads=hybrid.pin_cpu_grads,
        moments=_has_moments(hybrid),
    )
    lanes: dict[torch.device, Lane] = {
        device: WireLane(device) if device.type == "cuda" else HostLane()
        for device in {entry.param.device for entry in on_host}
    }
    optimizers = []
    for members, masters in zip(holders, memory.masters, strict=True):
        params = list(masters.tensors) if members[0].is_copied else [entry.param for entry in members]
        optimizers.append(hybrid.cpu_optimizer_cls([{**hybrid.param_groups[members[0].group], "params": params}]))
    sliced = _sliced(runs, optimizers, memory.masters)
    buckets: list[Bucket] = []
    for index, run in enumerate(runs):
        buffer = memory.ring[index % len(ring)]
        members, masters, optimizer = holders[run.holder], memory.masters[run.holder], optimizers[run.holder]
        lane = lanes[members[0].param.device]
        if not members[0].is_copied:
            rows = tuple(Row(entry.param, entry.param, 0, entry.param.numel(), entry.param, None) for entry in members)
            buckets.append(Bucket(rows, (), masters.flat, masters.flat, lane, optimizer))
            continue
        first, last = run.slice or (0, demands[run.holder].places.elements)
        flat = masters.flat[first:last]
        grads = buffer[: flat.nbytes].view(flat.dtype)
        if run.slice is not None:
            stepped = sliced[run.holder].slice_at(first)
            rows = (Row(members[0].param, masters.tensors[0], first, last, stepped, grads),)
        else:
            rows = tuple(
                Row(
                    entry.param,
                    master,
                    0,
                    master.numel(),
                    master,
                    grads[start : start + master.numel()].view_as(master),
                )
                for entry, master, start in zip(
                    members, masters.tensors, demands[run.holder].places.starts, strict=True
                )
            )
        counts = [row.stepped.numel() for row in rows]
        chunks = hybrid_buckets.cut(
            counts,
            hybrid_buckets.place(counts, flat.dtype),
            [not can_be_cut(row.param, row.master) for row in rows],
            hybrid.chunk_elements,
        )
        buckets.append(Bucket(rows, tuple(chunks), flat, grads, lane, optimizer, sliced.get(run.holder)))
    for lane in lanes.values():
        if isinstance(lane, WireLane):
            lane.staging_elements = staging_for(bucket for bucket in buckets if bucket.lane is lane)
    moments = {
        master: dict(zip(MOMENTS, held, strict=True))
        for masters, states in zip(memory.masters, memory.moments, strict=True)
        if states
        for master, *held in zip(masters.tensors, *(state.tensors for state in states), strict=True)
    }
    return _Made(buckets, moments, memory)


def _sliced(
    runs: Sequence[_Run], optimizers: Sequence[torch.optim.Optimizer], masters: Sequence[hybrid_memory.Cut]
) -> dict[int, SlicedMaster]:
    """What steps the sliced masters, by holder."""
    ranges: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for run in runs:
        if run.slice is not None:
            ranges[run.holder].append(run.slice)
    return {holder: SlicedMaster(optimizers[holder], masters[holder].flat, of_one) for holder, of_one in ranges.items()}


def _has_moments(hybrid: PipelinedHybridOptimizer) -> bool:
    """Whether the CPU optimizer is torch's Adam or AdamW, whose first step would make the moments."""
    kind = hybrid.cpu_optimizer_cls
    amsgrad = any(group.get("amsgrad") for group in hybrid.param_groups)
    return isinstance(kind, type) and issubclass(kind, torch.optim.Adam) and not amsgrad
