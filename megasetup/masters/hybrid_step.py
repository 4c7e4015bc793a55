"""One step of all that lies on the host.

While a bucket is stepped, the gradients of the next ones arrive and the masters of the last one go back.

What raises on the way, Ctrl-C included, leaves nothing under way: copies have ended, buffers and gradients are as after
any step. Whether anything had been stepped by then is remembered, because masters, moments and counts of steps that are
of two steps cannot be told from right ones afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from megasetup.masters.hybrid_moments import Moments
from megasetup.masters.hybrid_slices import SlicedMaster
from megasetup.masters.hybrid_traffic import Bucket, Lane, gradient_of


class HostStep:
    """One step; made for it and then dropped.

    Args:
        buckets: in the order in which they are stepped.
        lanes: what moves their values.
        moments: what holds Adam's moments.
        ahead: how many buckets' gradients are on their way while one is stepped.

    Attributes:
        has_begun: whether anything may have been stepped.
        done: buckets that have been stepped.
    """

    def __init__(self, buckets: Sequence[Bucket], lanes: Sequence[Lane], moments: Moments, *, ahead: int) -> None:
        self.has_begun = False
        self.done = 0
        self._buckets = buckets
        self._lanes = lanes
        self._moments = moments
        self._ahead = ahead
        self._waiting: Iterator[Bucket] = iter(buckets)
        self._arrived: dict[Bucket, torch.cuda.Event | None] = {}
        # What was attached to each of a bucket's tensors before its gradient was.
        self._before: dict[Bucket, list[tuple[torch.Tensor, torch.Tensor | None]]] = {}

    def run(self, ready: Callable[[], None], meanwhile: Callable[[], None]) -> None:
        """Take the step.

        Args:
            ready: called when the first gradients are on their way, before anything is stepped.
            meanwhile: called next; what it does is part of the step.
        """
        try:
            with torch.no_grad():
                sliced = self._begin_slices()
                for lane in self._lanes:
                    lane.begin()
                for _ in range(self._ahead):
                    self._fetch_next()
            ready()
            self.has_begun = True
            meanwhile()
            for bucket in self._buckets:
                with torch.no_grad():
                    self._fetch_next()
                event = self._arrived.pop(bucket)
                if event is not None:
                    event.synchronize()
                if bucket.sliced is None:
                    bucket.optimizer.step()
                else:
                    bucket.sliced.step(bucket.rows[0].stepped)
                with torch.no_grad():
                    self._take_back(bucket)
                    bucket.lane.send(bucket)
                self.done += 1
            with torch.no_grad():
                for one in sliced:
                    one.end()
        except BaseException:
            self._abandon()
            raise
        finally:
            for lane in self._lanes:
                lane.end()

    def _begin_slices(self) -> list[SlicedMaster]:
        """Prepare those sliced masters that have a gradient."""
        rows = {bucket.sliced: bucket.rows[0] for bucket in self._buckets if bucket.sliced is not None}
        begun = []
        for sliced, row in rows.items():
            if gradient_of(row.param) is not None:
                self._moments.begin(sliced.optimizer, row.master)
                sliced.begin()
                begun.append(sliced)
        return begun

    def _fetch_next(self) -> None:
        bucket = next(self._waiting, None)
        if bucket is not None:
            gradients = [gradient_of(row.param) for row in bucket.rows]
            self._arrived[bucket] = bucket.lane.fetch(bucket, gradients)
            self._give(bucket, gradients)

    def _give(self, bucket: Bucket, gradients: Sequence[torch.Tensor | None]) -> None:
        """Attach the gradients to what is stepped, and Adam's moments where it would now make its own."""
        self._before[bucket] = [(row.stepped, row.stepped.grad) for row in bucket.rows]
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
                self._moments.begin(bucket.optimizer, row.master)

    def _take_back(self, bucket: Bucket) -> None:
        """Attach what was attached: a buffer is another bucket's now, a parameter's own gradient is its user's."""
        for stepped, gradient in self._before.pop(bucket, ()):
            stepped.grad = gradient

    def _abandon(self) -> None:
        for bucket in list(self._before):
            self._take_back(bucket)
        for lane in self._lanes:
            lane.settle()
