"""Load balance: the instance with the least work that the coordinator has given it (MindIE's DIGS)."""

from collections.abc import Mapping
from dataclasses import dataclass

from coordinator.core.instance import Instance, Role

from .accounting import Accounting, Order, checked_number, checked_whole
from .policy import Demand, LoadView, Policy


@dataclass(frozen=True, slots=True)
class LoadBalanceOptions:
    """Options of `load_balance`; each names its letter in MindIE's `load_cost_coefficient` "a, i, o, n, k, m, r, b, c".

    Attributes:
        bytes_to_tokens: (i) prompt tokens per byte of prompt text.
        count_blocks: True: `load_cost_values` "1, 0", a request counts as its KV blocks; False: "1, 1", as one.
        sequence_cost: (a) weight of the estimated length of decode's batches; above 0 every request scores every
            instance.
        output_tokens: (o) output tokens that a running sequence is expected to have.
        batch_size: (n) sequences that decode computes at a time.
        small_batch: (k) up to so many sequences a rest of a batch counts half.
        busiest_cost: (m) weight of the number of requests on the busiest decode instance, of which that instance itself
            has one more; above 0 every request scores every instance.
        reported_cost: (r) weight of the blocks that the instance itself reported as used.
        request_cost: (b) weight of the number of requests on a decode instance.
        block_cost: (c) weight of the blocks that the coordinator has given to a decode instance.
        block_limit_rate: `res_limit_rate`, part of its blocks that an instance may have promised before it is full.
        respect_capacity: True: `select_type` 2; False: `select_type` 1, blocks are no limit.
        order: `reordering_type` 1, 2, 3: which waiting request goes first.
    """

    bytes_to_tokens: float = 0.22
    count_blocks: bool = True
    sequence_cost: float = 0
    output_tokens: int = 1024
    batch_size: int = 24
    small_batch: int = 6
    busiest_cost: float = 0
    reported_cost: float = 1
    request_cost: float = 0
    block_cost: float = 1
    block_limit_rate: float = 1.1
    respect_capacity: bool = True
    order: Order = "fcfs"

    def __post_init__(self) -> None:
        for name in ("sequence_cost", "busiest_cost", "reported_cost", "request_cost", "block_cost"):
            checked_number(name, getattr(self, name))
        for name, least in (("output_tokens", 0), ("batch_size", 1), ("small_batch", 0)):
            checked_whole(name, getattr(self, name), least=least)
        self.accounting()

    def accounting(self) -> Accounting:
        """The measures among these options; raises ValueError for those that cannot be."""
        return Accounting(
            bytes_to_tokens=self.bytes_to_tokens,
            count_blocks=self.count_blocks,
            respect_capacity=self.respect_capacity,
            block_limit_rate=self.block_limit_rate,
            order=self.order,
        )


class LoadBalance(Policy):
    """Least load first, per role by its own measure (protocols: MindIE §10.2).

    Prefill: requests plus blocks that wait for their prompt to be computed. Decode and hybrid: a weighted sum, by
    default the reported blocks plus those given out.
    """

    def __init__(self, options: LoadBalanceOptions = LoadBalanceOptions()) -> None:
        self.options = options
        self.accounting = options.accounting()
        self.per_request = options.sequence_cost != 0 or options.busiest_cost != 0

    def cost(self, load: LoadView, instance: Instance, demand: Demand) -> float:
        """Prefill: requests + blocks. Else MindIE's sum; the part that only depends on the request is left out."""
        if instance.role is Role.PREFILL:
            return load.requests + load.blocks
        options = self.options
        cost = (
            options.reported_cost * instance.capacity.reported_used_blocks
            + options.request_cost * (load.requests + 1)
            + options.block_cost * load.blocks
        )
        if not self.per_request:
            return cost
        cost += options.block_cost * self.accounting.blocks(demand.tokens, instance.capacity.block_tokens)
        cost += options.busiest_cost * (demand.busiest + (load.requests == demand.busiest))
        if options.sequence_cost:
            cost += options.sequence_cost * self._batched_tokens(load.lengths, demand)
        return cost

    def _batched_tokens(self, lengths: Mapping[int, int], demand: Demand) -> int:
        """Tokens that decode goes through if each batch takes as long as its longest sequence.

        While the busiest instance has less than half a batch there is no padding, and the plain sum is taken.
        """
        size, small = self.options.batch_size, self.options.small_batch
        sequences = [tokens + self.options.output_tokens for tokens, count in lengths.items() for _ in range(count)]
        sequences.append(demand.tokens)
        if 2 * demand.busiest < size:
            return sum(sequences)
        sequences.sort()
        total = 0
        for start in range(0, len(sequences), size):
            batch = sequences[start : start + size]
            longest = batch[-1]
            if len(batch) < size and len(batch) <= small:
                longest //= 2
            total += len(batch) * longest
        return total
