"""PipelinedHybridOptimizer: Megatron's HybridDeviceOptimizer, made and stepped fast, with the same results bit for bit.

The parameters that the stock class would offload are offloaded, each sub-optimizer class gets the settings that it
would get, and every attribute that Megatron reads is there with its meaning. What differs: the host memory comes from
two arenas (hybrid_host.py), and while one bucket, some parameters or a slice of a long one, is stepped, the wire moves
others (hybrid_step.py), whether or not overlap was asked for. Gradients pass through a few buffers, so
cpu_copy_map_grad, which only the stock step reads, has nothing to show and stays empty.

The host side is made when it is first needed, because DistributedOptimizer constructs its hybrid optimizer twice and
throws the first away: over whole parameters, then over this rank's shards. compat/hybrid_optimizer.py makes the second
at once, where a user expects to wait.

Faults of the stock class in megatron-core 0.19 that are not repeated here:
- A state dict loads also where a parameter is natively FP32, and in standard mode (KeyError).
- While it loads, the state of offloaded parameters stays on the host (it goes through the GPU, 12 bytes an element).
- A load that fails leaves the param groups as they were.
- A closure is evaluated once, and its gradients are stepped with (each sub-optimizer evaluates it, for nothing).
- A parameter without a gradient is not stepped (it is stepped again from its last gradient).
- After a load the GPU optimizer goes on counting its steps (it is set back to the loaded count before every step).
- Tensors that an asynchronous checkpoint's writer moved into shared memory are brought back before the next step (they
  stay unpinned, and are written while they are stepped; compat/async_save.py hands the writer copies).
- A natively FP32 parameter that stays on the GPU is stepped in precision-aware mode, where its gradient is not in .grad
  (it keeps its value).
- The GPU optimizer waits for the FP32 gradients that it reads (with overlap they are made on another stream).
- Shards of natively FP32 parameters may be made while gradients are enabled ("can't optimize a non-leaf Tensor").
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

from megasetup.masters import hybrid_buckets
from megasetup.masters.hybrid_choice import chosen, tensors_of
from megasetup.masters.hybrid_fill import fill
from megasetup.masters.hybrid_gpu import step_on_gpu
from megasetup.masters.hybrid_host import Settings, make_host_side
from megasetup.masters.hybrid_state import FromParam, adopt
from megasetup.masters.hybrid_step import HostStep
from megasetup.masters.hybrid_traffic import WireLane

_logger = logging.getLogger("megasetup")
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
        "_moments",
        "_populating",
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
    state: dict[torch.Tensor, dict[str, Any]]
    _has_told = False
    # Why no step is taken before a load; None where nothing is in the way.
    cut_off: str | None = None

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        params = list(params)
        for param in tensors_of(params):
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

    @property
    def gradient_buffers(self) -> list[torch.Tensor]:
        """The flat buffers on the host through which the gradients of copied parameters pass."""
        longest: dict[int, torch.Tensor] = {}
        for bucket in self._buckets:
            held = longest.get(bucket.grads.data_ptr(), bucket.grads[:0])
            if bucket.grads.nbytes > held.nbytes:
                longest[bucket.grads.data_ptr()] = bucket.grads
        return list(longest.values())

    def make(self) -> None:
        """Make the clones, fill them from the parameters, and make all else that a step needs.

        If all that was there already, it is made anew: the moments begin at zero again, and the steps at none.

        Raises:
            ArenaError: the host memory cannot be had or pinned.
        """
        if self.is_made:
            self.state = defaultdict(dict)
        self._make()
        self.cut_off = None

    @torch.no_grad()
    def _make(self) -> None:
        if self.is_made:  # let the old memory go first
            self._populating.stop()
            for name in _MADE_WITH_THE_HOST_SIDE:
                self.__dict__.pop(name, None)
        self.__dict__.update(_made(self))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's optimizers do, before the host side is made.

        Raises:
            NotImplementedError: the host side has been made. (Megatron's class takes the group, and raises a KeyError
                at the next step.)
        """
        if self.is_made:
            raise NotImplementedError(
                "a group cannot be added when the masters and moments of the others have been made: give the "
                "constructor all groups, those that are trained later too (a parameter without a gradient is not "
                "stepped), or make a new optimizer"
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every sub-optimizer; parameters on a GPU are written by the time that its current stream is.

        An exception on the way, Ctrl-C included, may leave some parameters stepped and others not, as in any optimizer;
        no copy is under way then. If so, a note in its traceback says it, and no step is taken before a load.

        Args:
            closure: evaluated once, before the gradients are read, as torch's optimizers do.

        Returns:
            What the closure returned.

        Raises:
            RuntimeError: an earlier step was cut off when parameters had been stepped.
            ValueError: a group holds a parameter that was not in it when the host side was made.
        """
        if self.cut_off is not None:
            raise RuntimeError(self.cut_off)
        self._sync_hdo_param_groups_to_sub_optimizers()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._bring_back()
        step = HostStep(self._buckets, self._lanes, self._moments, ahead=self.buckets_ahead)
        try:
            step.run(ready=self._populating.wait, meanwhile=self._step_on_gpu)
        except BaseException as error:
            if step.has_begun:
                self.cut_off = (
                    f"a step was cut off by {type(error).__name__} when {step.done} of {len(self._buckets)} buckets of "
                    "the CPU optimizer had been stepped: some weights, masters and moments are of this step and some "
                    "of the one before. Load model and optimizer from a checkpoint (load_state_dict) before the next "
                    "step, and do not save them as they are"
                )
                error.add_note(self.cut_off)
            raise
        self._sync_sub_optimizers_state_to_hdo()
        return loss

    def dummy_step(self) -> None:
        """A step with random gradients, by which Megatron makes the state that it is about to load into."""
        cut_off, self.cut_off = self.cut_off, None
        try:
            super().dummy_step()
        finally:
            self.cut_off = self.cut_off or cut_off

    def _bring_back(self) -> None:
        """Bring masters and moments back that were moved since the last step: buckets step and send what lies there."""
        left = [home for home in self._homes if home.is_left]
        if left:
            self._settle()
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

    def _settle(self) -> None:
        """Wait for what the last step sends: it reads masters that are about to be written."""
        for lane in self._lanes:
            lane.settle()

    def _step_on_gpu(self) -> None:
        if self.gpu_optimizer is not None:
            step_on_gpu(self.gpu_optimizer, self.inner_param_to_orig_param)

    @torch.no_grad()
    def update_fp32_param_by_new_param(self) -> None:
        """Write the parameters' values into their FP32 copies, those on the host through the engine."""
        fill(list(self.param_to_fp32_param.items()))

    def _sync_hdo_param_groups_to_sub_optimizers(self) -> None:
        """Settings (learning rate and so on) go to the sub-optimizers; their counts of steps stay their own."""
        self._sync_settings(("params", "step"))

    def _sync_settings(self, keep: Sequence[str]) -> None:
        group_of: dict[torch.Tensor, dict[str, Any]] = {}
        for group in self.param_groups:
            for param in group["params"]:
                inner = self.param_to_inner_param.get(param)
                if inner is None:
                    raise ValueError(
                        f"a param group holds a parameter of shape {tuple(param.shape)} that this optimizer was not "
                        "made with: give the constructor all parameters, or call make(), which begins the moments anew"
                    )
                group_of[inner] = group
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
        self.state = defaultdict(dict, {original.get(inner, inner): entry for inner, entry in self.state.items()})
        if any(param not in self.param_to_inner_param for param in tensors_of(self.param_groups)):
            self._make()  # Float16OptimizerWithFloat16Params changes the parameters and then loads
        self._sync_settings(("params",))
        self._adopt_state(lambda param, master, saved: saved is None)
        self.cut_off = None

    def _sync_hdo_state_to_sub_optimizers(self) -> None:
        """Megatron calls this when it has put loaded values into `state` and into the parameters."""
        # In standard mode what it loaded is the parameter itself, FP32 on the GPU; the clone follows.
        self._adopt_state(lambda param, master, saved: param.dtype == master.dtype)
        self.cut_off = None

    def _adopt_state(self, from_param: FromParam) -> None:
        self._settle()
        adopt(self.sub_optimizers, self.state, self.inner_param_to_orig_param, self._moments, from_param)


def _made(hybrid: PipelinedHybridOptimizer) -> dict[str, Any]:
    """The attributes of a hybrid optimizer's host side, and of its GPU side where that has FP32 copies."""
    on_host, copied_on_gpu = chosen(hybrid.param_groups, hybrid.offload_fraction, in_fp32=hybrid.param_update_in_fp32)
    masters: dict[torch.Tensor, torch.Tensor] = {
        param: torch.empty_like(param, dtype=torch.float32, requires_grad=False) for param in copied_on_gpu
    }
    host = make_host_side(
        on_host,
        Settings(
            groups=hybrid.param_groups,
            optimizer_cls=hybrid.cpu_optimizer_cls,
            pin_masters=hybrid.pin_cpu_params,
            pin_grads=hybrid.pin_cpu_grads,
            bucket_elements=hybrid.bucket_elements,
            chunk_elements=hybrid.chunk_elements,
            buckets_ahead=hybrid.buckets_ahead,
        ),
    )
    masters.update({row.param: row.master for bucket in host.buckets for row in bucket.rows})
    fill([(param, master) for param, master in masters.items() if master is not param])

    params = tensors_of(hybrid.param_groups)
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
    wires = [lane for lane in host.lanes if isinstance(lane, WireLane)]
    return {
        "cpu_param_groups": groups[0],
        "gpu_param_groups": groups[1],
        "gpu_params_map_cpu_copy": clones,
        "cpu_copys_map_gpu_param": {clone: param for param, clone in clones.items()},
        "param_to_fp32_param": fp32,
        "fp32_param_to_orig_param": {master: param for param, master in fp32.items()},
        "param_to_inner_param": inner,
        "inner_param_to_orig_param": original,
        "cpu_optimizers": list(dict.fromkeys(bucket.optimizer for bucket in host.buckets)),
        "gpu_optimizer": hybrid.gpu_optimizer_cls(groups[1]) if groups[1] else None,
        "cpu_copy_map_grad": {},
        "_arenas": host.memory.arenas,
        "_buckets": host.buckets,
        "_homes": host.memory.homes,
        "_lanes": host.lanes,
        "_moments": host.moments,
        "_populating": host.memory.populating,
        "_d2h_stream": wires[0].to_host if wires else None,
        "_h2d_stream": wires[0].to_device if wires else None,
    }
