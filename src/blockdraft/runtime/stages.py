"""How fast a run goes, from how fast each side goes alone: the model behind `blockdraft plan`.

A node's GPUs are dealt to targets and drafters, or every GPU holds a pair. Targets never talk to each other; drafters
sum their gradients once a step. docs/performance.md has what the model says of every measured run.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

SHARED_GAIN: Final = 1.026
"""Two sides on one GPU take a little less than one after the other: the gaps of one are filled by the other. Measured
over 500 steps at Qwen3-8B shapes (docs/performance.md, 2026-11-30): 16,616 tokens/s where the sum of both times gives
16,198. Slower drafters of earlier versions left more gaps and gained 8%."""
BACKWARD_SHARE: Final = 0.6
"""Of a drafter's last micro-batch: the time in which gradients are made, and their sums may already run."""
PEER_GB_S: Final = 285.0
"""Of an all-reduce between two H200 of one node (128 MiB in 0.47 ms), gradients counted once."""
NODE_GB_S: Final = 50.0
"""Between nodes: one 400 Gb/s card each. Not measured here."""
NEARLY: Final = 0.95
"""Share of the best speed from which on fewer nodes are worth a word."""


class Stages(NamedTuple):
    """Each side by itself on one of its GPUs."""

    target_tok_s: float
    drafter_tok_s: float
    """Update included."""
    micro_batch_tokens: float
    """Document tokens that a drafter trains on at once."""
    gradient_bytes: float
    accumulation: int = 1
    """Micro-batches of a step over all drafters; where there are more drafters, one of each."""
    reuse: int = 1
    """Passes over what a target has computed once."""
    exchanged_bytes: float = 0.0
    """Weights that the drafters of a node hand to each other once a step; none where each keeps the whole state."""


class Links(NamedTuple):
    """Bandwidths of an all-reduce, in GB/s."""

    inside: float = PEER_GB_S
    between: float = NODE_GB_S


class Split(NamedTuple):
    """One way of using some GPUs."""

    nodes: int
    targets: int
    """Target replicas of a node; in a shared split, its pairs."""
    drafters: int
    """Of a node."""
    gpus_per_target: int
    is_shared: bool
    tok_s: float
    limit: str
    """Which side, or what, sets the pace."""

    @property
    def gpus(self) -> int:
        """GPUs that are used."""
        return self.nodes * (self.targets if self.is_shared else self.targets * self.gpus_per_target + self.drafters)

    def spell(self) -> str:
        """Without numbers of speed."""
        node = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        if self.is_shared:
            return f"{node}{_count(self.targets, 'GPU')}, each with target and drafter"
        spans = f" over {self.gpus_per_target} GPUs each" if self.gpus_per_target > 1 else ""
        return f"{node}{_count(self.targets, 'target')}{spans} and {_count(self.drafters, 'drafter')}"


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' if number > 1 else ''}"


def sum_seconds(gradient_bytes: float, nodes: int, drafters: int, links: Links) -> float:
    """One sum of all gradients, as a ring: 2 (n - 1) / n of the bytes over the slowest link of it."""
    count = nodes * drafters
    if count == 1:
        return 0.0
    slowest = links.between if nodes > 1 else links.inside
    return 2 * (count - 1) / count * gradient_bytes / (slowest * 1e9)


def exchange_seconds(exchanged_bytes: float, drafters: int, links: Links) -> float:
    """Until each drafter of a node has what the others updated: (n - 1) / n of the weights come in to it."""
    return (drafters - 1) / drafters * exchanged_bytes / (links.inside * 1e9)


def per_drafter(stages: Stages, nodes: int, drafters: int) -> int:
    """Micro-batches of a step for each drafter."""
    return max(1, stages.accumulation // (nodes * drafters))


def drafter_rate(stages: Stages, nodes: int, drafters: int, links: Links, alone_tok_s: float) -> float:
    """Of one drafter among others: what of a sum does not fit behind its backward is added to each step.

    So is an exchange of weights, in full: how much of it the updates between its rounds hide was never measured.
    """
    step_tokens = stages.micro_batch_tokens * per_drafter(stages, nodes, drafters)
    exposed_s = exposed_seconds(stages, nodes, drafters, links, alone_tok_s)
    exchange_s = exchange_seconds(stages.exchanged_bytes, drafters, links)
    return step_tokens / (step_tokens / alone_tok_s + exposed_s + exchange_s)


def exposed_seconds(stages: Stages, nodes: int, drafters: int, links: Links, alone_tok_s: float) -> float:
    """What of a sum of gradients its drafter waits for."""
    hidden_s = BACKWARD_SHARE * stages.micro_batch_tokens / alone_tok_s
    return max(0.0, sum_seconds(stages.gradient_bytes, nodes, drafters, links) - hidden_s)


def _limit_between(stages: Stages, nodes: int, drafters: int, links: Links, alone_tok_s: float) -> str:
    """Which of the two slows drafters most."""
    exposed_s = exposed_seconds(stages, nodes, drafters, links, alone_tok_s)
    is_exchange = exchange_seconds(stages.exchanged_bytes, drafters, links) > exposed_s
    return "exchanges of weights" if is_exchange else "sums of gradients"


def apart(stages: Stages, nodes: int, targets: int, drafters: int, links: Links, gpus_per_target: int = 1) -> Split:
    """Targets and drafters on GPUs of their own: the slower side sets the pace."""
    target_rate = nodes * targets * stages.target_tok_s * stages.reuse
    alone = nodes * drafters * stages.drafter_tok_s
    summed = nodes * drafters * drafter_rate(stages, nodes, drafters, links, stages.drafter_tok_s)
    between = _limit_between(stages, nodes, drafters, links, stages.drafter_tok_s)
    limit = "targets" if target_rate < summed else between if summed < 0.95 * alone else "drafters"
    return Split(nodes, targets, drafters, gpus_per_target, False, min(target_rate, summed), limit)


def shared(stages: Stages, nodes: int, pairs: int, links: Links) -> Split:
    """A target and a drafter on every GPU."""
    target_rate = stages.target_tok_s * stages.reuse
    pair = SHARED_GAIN / (1 / target_rate + 1 / stages.drafter_tok_s)
    pair = min(pair, target_rate, stages.drafter_tok_s)
    rate = drafter_rate(stages, nodes, pairs, links, pair)
    limit = _limit_between(stages, nodes, pairs, links, pair) if rate < 0.95 * pair else "both sides"
    return Split(nodes, pairs, pairs, 1, True, nodes * pairs * rate, limit)


def splits(
    stages: Stages,
    gpus: int,
    gpus_per_node: int,
    links: Links,
    *,
    gpus_per_target: int = 1,
    may_share: bool = True,
) -> Iterator[Split]:
    """Every split of at most so many GPUs in which all nodes are alike, as a run needs them, and each full."""
    here = min(gpus, gpus_per_node)
    for nodes in range(1, max(1, gpus // gpus_per_node) + 1):
        if may_share and gpus_per_target == 1:
            yield shared(stages, nodes, here, links)
        for targets in range(1, here // gpus_per_target + 1):
            drafters = here - targets * gpus_per_target
            if drafters >= 1:
                yield apart(stages, nodes, targets, drafters, links, gpus_per_target)


def best(found: Iterable[Split]) -> Split | None:
    """The fastest, of equals the one on fewest GPUs; None where there is none."""
    return max(found, key=lambda split: (split.tok_s, -split.gpus), default=None)


def fewest_nodes(found: Iterable[Split], fastest: Split) -> Split:
    """Of those nearly as fast as the fastest, on fewest nodes; of these the fastest."""
    near = (split for split in found if split.tok_s >= NEARLY * fastest.tok_s)
    return min(near, key=lambda split: (split.nodes, -split.tok_s))
