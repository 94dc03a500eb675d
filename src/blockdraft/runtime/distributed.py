"""Summing gradients between drafter threads: each owns a process group, built directly, without a default group.

rank = node * drafters_per_node + i. gloo on CPUs, NCCL on GPUs. A TCPStore joins the nodes that torchrun started.
"""

import os
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from blockdraft.config import ConfigError

# The classes of process groups and stores are exported at run time only.
c10d: Any = torch.distributed

BUCKET_BYTES = 64 * 2**20


class World(NamedTuple):
    """Where this process stands among those of the run."""

    node: int
    num_nodes: int
    store: Any
    """torch.distributed store that all drafters of all nodes meet at."""


def is_several_nodes() -> bool:
    """Whether torchrun started more than this process."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def join_world(timeout_s: float = 300.0) -> World:
    """Reads what torchrun left in the environment; alone in the world without it.

    Raises:
        ConfigError: torchrun started several processes on one node.
    """
    num_nodes = int(os.environ.get("WORLD_SIZE", "1"))
    if num_nodes == 1:
        return World(0, 1, c10d.HashStore())
    node = int(os.environ["RANK"])
    store = c10d.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]) + 1,
        num_nodes,
        is_master=node == 0,
        timeout=timedelta(seconds=timeout_s),
    )
    return World(node, num_nodes, store)


class GradientSum:
    """One drafter thread's end of the sum over all drafters; built and used in that thread."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        self.device, self.rank = device, rank
        kept = c10d.PrefixStore("drafters", store)
        timeout = timedelta(seconds=timeout_s)
        if device.type == "cuda":
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self.group: Any = c10d.ProcessGroupNCCL(kept, rank, size, options)
        else:
            self.group = c10d.ProcessGroupGloo(kept, rank, size, timeout)

    def __call__(self, gradients: list[Tensor]) -> None:
        """Replaces each gradient by its sum over all drafters, in buckets."""
        options = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp.SUM
        for bucket in buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            self.group.allreduce([flat], options).wait()
            parts = flat.split([gradient.numel() for gradient in bucket])
            torch._foreach_copy_(bucket, [part.view_as(g) for part, g in zip(parts, bucket, strict=True)])

    def drop(self) -> None:
        """Leaves the group, which ends the collectives that others wait in with an error."""
        self.group = None


def buckets(gradients: list[Tensor]) -> list[list[Tensor]]:
    """Consecutive gradients of up to 64 MiB together."""
    found: list[list[Tensor]] = []
    size = BUCKET_BYTES
    for gradient in gradients:
        bytes_here = gradient.numel() * gradient.element_size()
        if size + bytes_here > BUCKET_BYTES:
            found.append([])
            size = 0
        found[-1].append(gradient)
        size += bytes_here
    return found


def check_devices(names: tuple[str, ...], what: str) -> list[torch.device]:
    """Parses device names and refuses those that are not there.

    Raises:
        ConfigError: an unknown device.
    """
    devices = []
    for name in names:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ConfigError(f"runtime.{what}: expected cpu or cuda:N, got {name!r}") from error
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", 0)
        count = torch.cuda.device_count()
        if device.type not in ("cpu", "cuda") or (device.type == "cuda" and device.index >= count):
            raise ConfigError(f"runtime.{what}: {name} is not here; this machine has {count} CUDA devices (and cpu)")
        devices.append(device)
    if not devices:
        raise ConfigError(f"runtime.{what} is empty; name at least one device, such as cpu or cuda:0")
    return devices
