"""Summing gradients between drafter threads, and handing weights over: each owns a process group, built directly.

rank = node * drafters_per_node + i. gloo on CPUs, NCCL on GPUs. With several nodes, one process each, started by
torchrun, a TCPStore joins them; with one, a HashStore joins its threads.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from blockdraft.config import ConfigError
from blockdraft.runtime.meeting import Meeting

# The classes of process groups and stores are exported at run time only.
c10d: Any = torch.distributed

NCCL_SETTINGS = {
    # Control ends a run. NCCL's watchdog, and the monitor that watches it, would end the whole process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
SUM_SECONDS = 60.0
"""Drafters enter a sum together, so it lasts as long as the slowest node's micro-batches (decision 0006)."""
LOST_SECONDS = 60.0
"""A node that has not been heard of for this long is taken for dead."""
TELL_SECONDS = 10.0
JOIN_SECONDS = 1800.0
"""Longest wait for another node's start-up."""
STOPPED = "failed: StopRequested"
"""Of what a node says that was asked to stop before there was a step to finish."""
BEAT_SECONDS = 1.0
POLL_SECONDS = 0.002

NCCL_CTAS: int | None = None
"""None: NCCL's own choice."""
SUM, EXCHANGE = "sum of gradients", "exchange of weights"


class NodeLost(RuntimeError):
    """Another process of this run ended, or is not heard of any more."""


class World:
    """This process among those of the run. With one node everything but `store` is a no-op.

    Only its control thread and its drafter 0 use it, each its own client of the store.
    """

    def __init__(self, node: int, num_nodes: int, store: Any) -> None:
        """`store`: what all drafters of all nodes meet at."""
        self.node, self.num_nodes, self.store = node, num_nodes, store
        self._control, self._lead = self.client(), self.client()
        self._is_ready = False
        self._beats, self._beat_time = 0, 0.0
        self._heard: dict[int, tuple[int, float]] = {}

    def client(self) -> Any:
        """A client of the store for one thread: a wait for a key holds its client until the key is there."""
        return self.store.clone() if self.num_nodes > 1 else self.store

    # In control's thread

    def agree(self, name: str, value: str, seconds: float = JOIN_SECONDS) -> None:
        """Refuses to go on when this node's value is not node 0's.

        Raises:
            ConfigError: it is another.
            NodeLost: node 0 did not say its own in time.
        """
        if self.num_nodes == 1:
            return
        key, deadline = f"agree/{name}", time.monotonic() + seconds
        if self.node == 0:
            self._ask(lambda: self._control.set(key, value))
            return
        while not self._ask(lambda: self._control.check([key])):
            self.check_failure()
            if time.monotonic() > deadline:
                raise NodeLost(f"node 0 did not come this far within {seconds:.0f} s")
            time.sleep(0.05)
        expected = self._ask(lambda: self._control.get(key)).decode()
        if value != expected:
            raise ConfigError(f"{name}: node 0 has {expected}, node {self.node} has {value}; all nodes need the same")

    def is_everyone_ready(self) -> bool:
        """Says that this node is ready; whether all are. Does not wait."""
        if self.num_nodes == 1:
            return True
        more = 0 if self._is_ready else 1
        self._is_ready = True
        return bool(self._ask(lambda: self._control.add("ready", more)) == self.num_nodes)

    def beat(self) -> None:
        """Says once a second that this node lives, and looks whether the others do.

        Raises:
            NodeLost: one has failed, or has been silent for LOST_SECONDS.
        """
        now = time.monotonic()
        if self.num_nodes == 1 or now - self._beat_time < BEAT_SECONDS:
            return
        self._beat_time = now
        self._ask(lambda: self._control.add(f"alive/{self.node}", 1))
        self.check_failure()
        for node in range(self.num_nodes):
            count = self._count(f"alive/{node}")
            seen, since = self._heard.get(node, (-1, now))
            if count != seen:
                self._heard[node] = count, now
            elif count and now - since > LOST_SECONDS:
                raise NodeLost(f"node {node} has not been heard of for {LOST_SECONDS:.0f} s; the run cannot go on")

    def fail(self, message: str) -> None:
        """Tells the other nodes why this one ends. A stop is no fault: none finds the store gone before it hears."""
        if self.num_nodes > 1:
            text = f"node {self.node} failed: {message.strip().splitlines()[0]}"
            try:
                if not self._control.check(["failed"]):
                    self._control.set("failed", text)
                if STOPPED in self._control.get("failed").decode():
                    self.part(TELL_SECONDS)
            except RuntimeError:
                # The store went away with its node: nobody is left to tell.
                return

    def check_failure(self) -> None:
        """Raises NodeLost when another node has failed."""
        if self.num_nodes > 1 and self._ask(lambda: self._control.check(["failed"])):
            raise NodeLost(self._ask(lambda: self._control.get("failed")).decode())

    def reason(self, seconds: float) -> str:
        """Why the run broke, as far as other nodes have said or say within `seconds`; empty otherwise."""
        deadline = time.monotonic() + seconds
        while self.num_nodes > 1 and time.monotonic() < deadline:
            try:
                self.check_failure()
            except NodeLost as error:
                return str(error)
            time.sleep(0.05)
        return ""

    def want_stop(self) -> None:
        """Asks node 0 to end the run after its next step."""
        if self.num_nodes > 1:
            self._ask(lambda: self._control.add("stop", 1))

    def part(self, seconds: float = LOST_SECONDS) -> None:
        """The last exchange: whoever keeps the store leaves when all others have, at the latest after `seconds`."""
        if self.num_nodes == 1:
            return
        deadline = time.monotonic() + seconds
        gone = self._ask(lambda: self._control.add("gone", 1))
        while self.node == 0 and gone < self.num_nodes and time.monotonic() < deadline:
            time.sleep(0.02)
            gone = self._ask(lambda: self._control.add("gone", 0))

    def _count(self, key: str) -> int:
        return int(self._ask(lambda: self._control.add(key, 0)))

    # In drafter 0's thread

    def is_stop_wanted(self) -> bool:
        """Whether some node asked for it; read by node 0."""
        return self.num_nodes > 1 and bool(self._ask(lambda: self._lead.add("stop", 0)))

    def lead(self, step: int, last_step: int) -> None:
        """Node 0: says that it has come to the sum of `step`, and which step is the last."""
        if self.num_nodes > 1:
            self._ask(lambda: self._lead.set("lead", f"{step} {last_step}"))

    def follow(self, step: int, while_waiting: Callable[[], None]) -> int:
        """Other nodes: waits until node 0 has come to the sum of `step` (it saves and evaluates); the last step."""
        while True:
            if self._ask(lambda: self._lead.check(["lead"])):
                reached, last_step = map(int, self._ask(lambda: self._lead.get("lead")).split())
                if reached >= step:
                    return last_step
            while_waiting()
            time.sleep(POLL_SECONDS)

    def finish(self, while_waiting: Callable[[], None]) -> None:
        """Waits until every node's drafters have their last sum."""
        done = self._ask(lambda: self._lead.add("done", 1)) if self.num_nodes > 1 else 1
        while done < self.num_nodes:
            while_waiting()
            time.sleep(POLL_SECONDS)
            done = self._ask(lambda: self._lead.add("done", 0))

    @staticmethod
    def _ask(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RuntimeError as error:
            raise NodeLost(f"the store that joins the nodes is gone, and node 0 with it: {error}") from error


def is_several_nodes() -> bool:
    """Whether torchrun started more than this process."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def this_node() -> int:
    """Number of this process among those of the run; 0 without torchrun."""
    return int(os.environ["RANK"]) if is_several_nodes() else 0


def num_nodes() -> int:
    """Processes of the run, one a node."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join_world(timeout_s: float = 300.0) -> World:
    """Joins the processes that torchrun started, by what it left in the environment; alone without it.

    Raises:
        ConfigError: torchrun started several processes on one node.
        NodeLost: the others did not come in time.
    """
    if not is_several_nodes():
        return World(0, 1, c10d.HashStore())
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if here != 1:
        raise ConfigError(
            f"one process drives all devices of a node: expected torchrun --nproc-per-node 1, found {here}; name the "
            "node's devices in runtime.targets and runtime.drafters"
        )
    try:
        timeout = timedelta(seconds=timeout_s)
        store, node, size = next(c10d.rendezvous("env://", timeout=timeout))
    except RuntimeError as error:
        raise NodeLost(f"the other nodes did not come within {timeout_s:.0f} s: {error}") from error
    return World(node, size, c10d.PrefixStore("blockdraft", store))


class Running(NamedTuple):
    """A collective on its way, and the calls that end it."""

    what: str
    ends: tuple[Callable[[], object], ...]


class GradientSum:
    """One drafter thread's end of the sums over all drafters; built and used in that thread.

    Drafters of a node that divide the optimizer's state hand each other the new weights here too.
    Sums run beside the backward that makes the next gradients: on GPUs on NCCL's own stream, on CPUs in gloo's threads.
    Every drafter has to start the same buckets in the same order.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        meet: Callable[[], None] = lambda: None,
        most_ctas: int | None = NCCL_CTAS,
        near: int | None = None,
        launch: Meeting | None = None,
    ) -> None:
        """`meet`: called before a step's first sum; returns when all drafters of this process are there, or raises.

        `most_ctas`: multiprocessors that NCCL may take from the backward beside it; None leaves it to NCCL.
        `launch`: where the drafters of this process meet before and after a launch on GPUs; needed with several.
        `near`: drafters of a node, if they hand each other weights.
        """
        self.device, self.rank, self.size, self.timeout_s, self.meet = device, rank, size, timeout_s, meet
        self._launch = launch
        self._running: deque[Running] = deque()
        self._options = c10d.AllreduceCoalescedOptions()
        self._options.reduceOp = c10d.ReduceOp.SUM
        self._most_ctas = most_ctas
        self.group: Any = self._join(c10d.PrefixStore("drafters", store), rank, size)
        self.near: Any = None
        """The group of the drafters of this node; with one node, of all."""
        if near == size:
            self.near = self.group
        elif near is not None:
            self.near = self._join(c10d.PrefixStore(f"node {rank // near}", store), rank % near, near)

    def _join(self, store: Any, rank: int, size: int) -> Any:
        timeout = timedelta(seconds=self.timeout_s)
        if self.device.type != "cuda":
            return c10d.ProcessGroupGloo(store, rank, size, timeout)
        for name, value in NCCL_SETTINGS.items():
            os.environ.setdefault(name, value)
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timeout
        # Its blocks get in as soon as one of the backward's ends.
        options.is_high_priority_stream = True
        if self._most_ctas is not None:
            options.config.max_ctas = self._most_ctas
        return c10d.ProcessGroupNCCL(store, rank, size, options)

    @contextlib.contextmanager
    def _launching(self) -> Iterator[None]:
        """On GPUs all drafters of this process launch a collective at the same moment: see runtime/meeting.py."""
        if self._launch is None or self.device.type != "cuda":
            yield
            return
        self._launch.meet()
        yield
        self._launch.meet()

    def start(self, bucket: list[Tensor]) -> None:
        """Begins to replace these tensors, all of one type, by their sums over all drafters.

        On a GPU the sum comes behind what the current stream holds now. Nobody may touch the tensors before `wait`.

        Raises:
            NodeLost: another drafter left.
        """
        try:
            with self._launching():
                work = self.group.allreduce_coalesced(bucket, self._options)
        except RuntimeError as error:
            raise self._lost(SUM) from error
        self._running.append(Running(SUM, (work.wait,)))

    def hand_out(self, weights: list[tuple[int, Tensor]]) -> None:
        """Begins to copy each weight from the drafter of this node with that number to the node's others, in place.

        On a GPU the copies come behind what the current stream holds now, and are one launch of NCCL's. On a CPU each
        is made in `wait`: gloo finishes what it has begun before a group can be left, also what nobody will send.

        Raises:
            NodeLost: another drafter left.
        """
        if self.device.type != "cuda":
            ends = [partial(self._broadcast_now, root, weight) for root, weight in weights]
            self._running.append(Running(EXCHANGE, tuple(ends)))
            return
        try:
            with self._launching():
                self.near._start_coalescing()
                for root, weight in weights:
                    self._broadcast(root, weight)
                work = self.near._end_coalescing()
        except RuntimeError as error:
            raise self._lost(EXCHANGE) from error
        self._running.append(Running(EXCHANGE, (work.wait,)))

    def _broadcast(self, root: int, weight: Tensor) -> Any:
        options = c10d.BroadcastOptions()
        options.rootRank = root
        # As bytes: gloo does not know every type.
        return self.near.broadcast([weight.view(-1).view(torch.uint8)], options)

    def _broadcast_now(self, root: int, weight: Tensor) -> None:
        self._broadcast(root, weight).wait()

    def wait(self) -> None:
        """Ends the oldest sum or exchange that was started; on a GPU the current stream waits for it, not this thread.

        Raises:
            NodeLost: another drafter left, or did not come in time.
        """
        what, ends = self._running[0]
        try:
            for end in ends:
                end()
        except RuntimeError as error:
            raise self._lost(what) from error
        self._running.popleft()

    def _lost(self, what: str) -> NodeLost:
        return NodeLost(
            f"the {what} over {self.size} drafters failed at drafter {self.rank}: another one ended, or did not come "
            f"within {self.timeout_s:.0f} s"
        )

    def drop(self) -> None:
        """Leaves the group, which ends the collectives that others wait in with an error."""
        # A sum that is still running keeps its connections open for as long as it is kept.
        self._running.clear()
        self.group = self.near = None

    def abort(self) -> list[threading.Thread]:
        """Ends a collective on GPUs that this drafter waits in; called by control. gloo's end with `drop`.

        Returns the threads that do it, one a group: an abort may wait until the other drafters' groups are aborted too.
        """
        groups = {id(group): group for group in (self.group, self.near) if group is not None}
        if self.device.type != "cuda":
            return []
        threads = [threading.Thread(target=group.abort, name="abort", daemon=True) for group in groups.values()]
        for thread in threads:
            thread.start()
        return threads
