"""PipelinedHybridOptimizer: Megatron's HybridDeviceOptimizer, made and stepped fast, with the same results bit for bit.

The parameters that the stock class would offload are offloaded, each sub-optimizer class gets the settings that it
would get, and every attribute that Megatron reads is there with its meaning. What differs: the host memory comes from
two arenas (hybrid_memory.py), and one CPU sub-optimizer steps a bucket of parameters while the wire moves the others
(hybrid_buckets.py, hybrid_traffic.py), whether or not overlap was asked for.

The host side is made when it is first needed, because DistributedOptimizer constructs its hybrid optimizer twice and
throws the first away: over whole parameters, then over this rank's shards. compat/hybrid_optimizer.py makes the second
at once, where a user expects to wait.

Faults of the stock class in megatron-core 0.19 that are not repeated here:
- A state dict loads also where a parameter is natively FP32, and in standard mode (KeyError).
- While it loads, the state of offloaded parameters stays on the host (it goes through the GPU, 12 bytes an element).
- A load that fails leaves the param groups as they were.
- A parameter without a gradient is not stepped (it is stepped again from its last gradient).
- After a load the GPU optimizer goes on counting its steps (it is set back to the loaded count before every step).
- The GPU optimizer waits for the FP32 gradients that it reads (with overlap they are made on another stream).
- Shards of natively FP32 parameters may be made while gradients are enabled ("can't optimize a non-leaf Tensor").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

from megasetup import kernels
from megasetup.masters import hybrid_buckets, hybrid_memory
from megasetup.masters.hybrid_traffic import Bucket, HostLane, Lane, Row, WireLane, can_be_cut, gradient_of

_CPU = torch.device("cpu")
# Buckets whose gradients are on their way while one is stepped: the wire is three times as fast as the CPU's Adam, so
# this many keep it ahead even of a bucket that is several times as long as the one before.
_AHEAD = 6

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
        "_buckets",
        "_lanes",
        "_moments",
        "_used_moments",
        "_d2h_stream",
        "_h2d_stream",
        "_cpu_optimizer_map_data_event",
    }
)


class PipelinedHybridOptimizer(HybridDeviceOptimizer):  # type: ignore[misc]  # Megatron is untyped
    """Steps a share of the parameters on the host, with traffic and CPU optimizer overlapped.

    Takes what HybridDeviceOptimizer takes. Parameters that lie on the host themselves are stepped there too, as the
    stock class means to.

    Raises:
        ArenaError: (when the host side is made) the host memory cannot be had or pinned.
    """

    # Elements; a benchmark may try others.
    bucket_elements: ClassVar[int] = hybrid_buckets.BUCKET_ELEMENTS
    chunk_elements: ClassVar[int] = hybrid_buckets.CHUNK_ELEMENTS

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

    @torch.no_grad()
    def make(self) -> None:
        """Make the clones, fill them from the parameters, and make all else that a step needs; again, if it was made.

        Raises:
            ArenaError: the host memory cannot be had or pinned.
        """
        if self.is_made:  # let the old memory go first
            for name in _MADE_WITH_THE_HOST_SIDE:
                self.__dict__.pop(name, None)
        self.__dict__.update(_made(self))

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """One step of every sub-optimizer; parameters on a GPU are written by the time that its current stream is."""
        self._sync_hdo_param_groups_to_sub_optimizers()
        buckets: list[Bucket] = self._buckets
        arrived: dict[torch.optim.Optimizer, torch.cuda.Event | None] = self._cpu_optimizer_map_data_event
        lanes: list[Lane] = self._lanes
        waiting = iter(buckets)

        def fetch_next() -> None:
            bucket = next(waiting, None)
            if bucket is not None:
                gradients = [gradient_of(row.param) for row in bucket.rows]
                arrived[bucket.optimizer] = bucket.lane.fetch(bucket, gradients)
                self._give(bucket, gradients)

        for lane in lanes:
            lane.begin()
        try:
            with torch.no_grad():
                for _ in range(_AHEAD):
                    fetch_next()
            if self.gpu_optimizer is not None:
                self._step_on_gpu(closure)
            for bucket in buckets:
                with torch.no_grad():
                    fetch_next()
                event = arrived.pop(bucket.optimizer)
                if event is not None:
                    event.synchronize()
                bucket.optimizer.step(closure)
                with torch.no_grad():
                    bucket.lane.send(bucket)
        finally:
            arrived.clear()
            for lane in lanes:
                lane.end()
        self._sync_sub_optimizers_state_to_hdo()

    def _give(self, bucket: Bucket, gradients: Sequence[torch.Tensor | None]) -> None:
        """Attach the gradients to the masters, and Adam's moments where it would now make its own."""
        state = bucket.optimizer.state
        for row, gradient in zip(bucket.rows, gradients, strict=True):
            master = row.master
            if gradient is None:
                master.grad = None
                continue
            if row.grad is not None:
                master.grad = row.grad
            elif gradient is not master.grad:
                master.grad = gradient.to(master.dtype)
            if master in self._moments and not state[master]:
                settings = bucket.optimizer.param_groups[0]
                # As torch's Adam begins, with the moments in memory that has been touched.
                on_device = settings["capturable"] or settings["fused"]
                state[master]["step"] = torch.zeros((), dtype=torch.float32) if on_device else torch.tensor(0.0)
                if master in self._used_moments:
                    for moment in self._moments[master].values():
                        moment.zero_()
                self._used_moments.add(master)
                state[master].update(self._moments[master])

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
    buckets, moments = _make_buckets(hybrid, on_host)
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
        "cpu_optimizers": [bucket.optimizer for bucket in buckets],
        "gpu_optimizer": hybrid.gpu_optimizer_cls(groups[1]) if groups[1] else None,
        "cpu_copy_map_grad": {
            row.master: row.grad for bucket in buckets for row in bucket.rows if row.grad is not None
        },
        "_buckets": buckets,
        "_lanes": lanes,
        "_moments": moments,
        "_used_moments": set(),
        "_d2h_stream": wires[0].to_host if wires else None,
        "_h2d_stream": wires[0].to_device if wires else None,
        "_cpu_optimizer_map_data_event": {},
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


def _make_buckets(
    hybrid: PipelinedHybridOptimizer, on_host: Sequence[_OnHost]
) -> tuple[list[Bucket], dict[torch.Tensor, dict[str, torch.Tensor]]]:
    """Buckets in the order of a step, their masters still to be filled; and the moments' memory by master."""
    kinds: dict[tuple[int, torch.device, torch.dtype, bool], list[_OnHost]] = defaultdict(list)
    for entry in on_host:
        kinds[entry.kind].append(entry)
    members = [
        [entries[index] for index in indices]
        for entries in kinds.values()
        for indices in hybrid_buckets.group([entry.param.numel() for entry in entries], hybrid.bucket_elements)
    ]
    members = hybrid_buckets.large_in_the_middle(members, lambda bucket: sum(entry.param.numel() for entry in bucket))
    demands = [
        hybrid_memory.Demand(tuple(entry.param.shape for entry in bucket), bucket[0].dtype)
        for bucket in members
        if bucket[0].is_copied
    ]
    devices = [entry.param.device for entry in on_host if entry.param.is_cuda]
    memory = iter(
        hybrid_memory.allocate(
            demands,
            devices[0] if devices else _CPU,
            pin_masters=hybrid.pin_cpu_params,
            pin_grads=hybrid.pin_cpu_grads,
            moments=_has_moments(hybrid),
        )
    )
    lanes: dict[torch.device, Lane] = {
        device: WireLane(device, hybrid.chunk_elements) if device.type == "cuda" else HostLane()
        for device in {entry.param.device for entry in on_host}
    }
    buckets: list[Bucket] = []
    moments: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    for bucket in members:
        params = [entry.param for entry in bucket]
        lane, settings = lanes[params[0].device], hybrid.param_groups[bucket[0].group]
        if not bucket[0].is_copied:
            optimizer = hybrid.cpu_optimizer_cls([{**settings, "params": params}])
            nothing = torch.empty(0, dtype=bucket[0].dtype)
            rows = tuple(Row(param, param, None) for param in params)
            buckets.append(Bucket(rows, (), nothing, nothing, lane, optimizer))
            continue
        masters, grads, states = next(memory)
        rows = tuple(map(Row, params, masters.tensors, grads.tensors))
        counts = [param.numel() for param in params]
        whole = [not can_be_cut(row.param, row.master) for row in rows]
        chunks = hybrid_buckets.cut(counts, hybrid_buckets.place(counts, bucket[0].dtype), whole, hybrid.chunk_elements)
        optimizer = hybrid.cpu_optimizer_cls([{**settings, "params": list(masters.tensors)}])
        buckets.append(Bucket(rows, tuple(chunks), masters.flat, grads.flat, lane, optimizer))
        if states:
            for master, *held in zip(masters.tensors, *(state.tensors for state in states), strict=True):
                moments[master] = dict(zip(hybrid_memory.MOMENTS, held, strict=True))
    return buckets, moments


def _has_moments(hybrid: PipelinedHybridOptimizer) -> bool:
    """Whether the CPU optimizer is torch's Adam or AdamW, whose first step would make the moments."""
    kind = hybrid.cpu_optimizer_cls
    amsgrad = any(group.get("amsgrad") for group in hybrid.param_groups)
    return isinstance(kind, type) and issubclass(kind, torch.optim.Adam) and not amsgrad
