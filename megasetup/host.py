"""What this host's memory is and what limits it, read from /proc and /sys and never changed.

Who makes a large allocation asks here first: the kernel grants any mapping and kills the process when its pages do not
fit, so that an error must come before the first touch.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Memory:
    """Host memory in bytes.

    Attributes:
        total, available: of the machine, as the kernel estimates it.
        container_limit, container_used: of the control group around this process that has the least room, None where
            none limits it. Cached file pages, which the kernel takes back when it needs them, do not count as used.
        lock_limit: RLIMIT_MEMLOCK, None for unlimited. The NVIDIA driver's pinned memory is not counted against it on
            most systems; RDMA's is.
    """

    total: int
    available: int
    container_limit: int | None
    container_used: int | None
    lock_limit: int | None

    @property
    def usable(self) -> int:
        """Bytes that can still be had: what the machine has left, or the container, whichever is less."""
        return min(self.available, self.container_room)

    @property
    def container_room(self) -> int:
        """Bytes that the container has left; the machine's total where nothing limits it."""
        if self.container_limit is None:
            return self.total
        return max(0, self.container_limit - (self.container_used or 0))


def read(path: str | Path) -> str | None:
    """A small system file's text, stripped; None where it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def control_groups() -> list[Path]:
    """The folders of this process's control groups, innermost first, version 2 and the version 1 controllers."""
    root = Path("/sys/fs/cgroup")
    folders: list[Path] = []
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        bases = [root] if not controllers else [root / name for name in {controllers, *controllers.split(",")}]
        inside = Path(path.lstrip("/"))
        for base in bases:
            if base.is_dir():
                # A container may see its own group mounted as the root, so every ancestor is looked at.
                folders += [base / part for part in (inside, *inside.parents)]
    return folders


def _numbers(text: str | None) -> dict[str, int]:
    """Lines of "name number" (a colon after the name, and a unit after the number, allowed)."""
    pairs = (line.split() for line in (text or "").splitlines())
    return {pair[0].rstrip(":"): int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}


def _container(total: int) -> tuple[int | None, int | None]:
    tightest: tuple[int | None, int | None] = (None, None)
    room = None
    for folder in control_groups():
        # Version 1 counts the groups below in what begins with "total_".
        for limit_file, used_file, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            text = read(folder / limit_file)
            # Version 1 writes "no limit" as a number near 2^63, so a limit counts only below what the machine has.
            if not text or not text.isdigit() or int(text) >= total:
                continue
            cache = _numbers(read(folder / "memory.stat"))
            cached = cache.get(prefix + "inactive_file", 0) + cache.get(prefix + "active_file", 0)
            used = max(0, int(read(folder / used_file) or 0) - cached)
            if room is None or int(text) - used < room:
                room, tightest = int(text) - used, (int(text), used)
    return tightest


def memory() -> Memory:
    """Host memory now, and what limits it."""
    kernel = {name: kilobytes * 1024 for name, kilobytes in _numbers(read("/proc/meminfo")).items()}
    total = kernel.get("MemTotal", 1 << 62)
    limit, used = _container(total)
    lock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Memory(
        total=total,
        available=kernel.get("MemAvailable", total),
        container_limit=limit,
        container_used=used,
        lock_limit=None if lock == resource.RLIM_INFINITY else lock,
    )
