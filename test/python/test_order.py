"""Priorities from the order in which forward uses parameters: published by rank 0, applied two steps later, a hint."""

import itertools
import random

import pytest

import jobs  # noqa: F401  (the package's path)
from test_broken_off import broken_off
from test_ops import hvd


def order_module():
    pytest.importorskip("torch")
    from tally.torch.horovod import order
    return order


# --- without a job ------------------------------------------------------------------------------------------


class Ranks:
    """Orders of several ranks, whose words are added up as the job does it."""

    def __init__(self, ranks, count):
        Order = order_module().Order
        self.orders = [Order(count, rank == 0) for rank in range(ranks)]

    def step(self, uses, made=None):
        """uses: for each rank the parameters in the order of its forward, or None where no gate speaks; the same of
        backward.  The order that each rank's gradients of this step have."""
        words, now = [], []
        for order, one in zip(self.orders, uses):
            for number in one or ():
                order.used(number)
            words.append(order.begin()[1])
            now.append(list(order.order))
            for number in (made or reversed(one or ())):
                order.made(number)
        total = [sum(column) for column in zip(*words)]
        for order in self.orders:
            order.heard(total)
            order.end()
        return now


def test_rank_0_decides_and_two_steps_later_all_follow():
    ranks = Ranks(3, 4)
    uses = [[2, 0, 1, 3], [3, 2, 1, 0], [0, 1, 2, 3]]
    first = [list(range(4))] * 3
    assert [ranks.step(uses) for _ in range(4)] == [first, first, [uses[0]] * 3, [uses[0]] * 3]


def test_an_order_that_changes_is_published_again():
    ranks = Ranks(2, 3)
    orders = [[0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 0, 2], [1, 0, 2], [1, 0, 2]]
    seen = [ranks.step([order, [0, 1, 2]])[1] for order in orders]
    assert seen == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 0, 2]]


@pytest.mark.parametrize("gated", (True, False))
def test_a_begin_is_broken_off(gated):
    """At each line: the next call does all that one does which nothing breaks off."""
    orders = [order_module().Order(3, True) for _ in range(2)]
    for number in itertools.count(1):
        for order in orders:
            for one in random.Random(number).sample(range(3), 3):
                (order.used if gated else order.made)(one)
        more = broken_off(orders[0].begin, {"begin", "merged"}, number)
        words = [order.begin() for order in orders]
        assert words[0] == words[1] and vars(orders[0]) == vars(orders[1])
        if not more:
            break
        for order, (_, places) in zip(orders, words):
            order.heard(places)
            order.end()
    assert number > 10


def test_what_stays_is_not_published_again():
    Order = order_module().Order
    order, told = Order(3, True), []
    for _ in range(4):
        for number in (1, 0, 2):
            order.used(number)
        told.append(order.begin()[1])
        order.end()
    assert told == [[2, 1, 3], [0] * 3, [0] * 3, [0] * 3]


@pytest.mark.parametrize("gated", [True, False])
def test_an_order_that_has_settled_is_looked_at_rarely_and_its_change_is_seen(gated):
    module = order_module()
    ranks, looks, followed = Ranks(1, 3), [], None
    for step in range(100):
        uses = [0, 1, 2] if step < 50 else [2, 0, 1]
        looks.append(ranks.orders[0].looks)
        order = ranks.step([uses if gated else None], made=[0, 2, 1] if gated else uses[::-1])[0]
        assert order == [0, 1, 2] or (order == [2, 0, 1] and step > 50)
        followed = step if followed is None and order == [2, 0, 1] else followed
    assert looks[:module.SETTLED] == [True] * module.SETTLED
    assert sum(looks[20:50]) <= 30 // module.EVERY + 1
    assert followed <= 50 + module.EVERY + module.STEPS_AHEAD + 1


def test_backward_tells_where_no_gate_speaks():
    """Its reverse, which is known when the step is over: one step later."""
    ranks = Ranks(2, 3)
    seen = [ranks.step([None, None], made=[1, 0, 2])[1] for _ in range(5)]
    assert seen == [[0, 1, 2]] * 3 + [[2, 0, 1]] * 2


def test_what_is_recomputed_in_backward_is_no_first_use():
    Order = order_module().Order
    order = Order(3, True)
    for number in (0, 1, 2):
        order.used(number)
    assert order.begin() == (False, [0, 0, 0])
    for number in (2, 1, 0):
        order.used(number)
    order.end()
    for number in (0, 1, 2):
        order.used(number)
    assert order.begin() == (False, [0, 0, 0])


@pytest.mark.parametrize("order, seen, result", [
    ([0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]),
    ([0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3]),           # 1 was not used this time
    ([0, 1, 2, 3], [1, 2], [0, 1, 2, 3]),
    ([0, 1, 2, 3], [3, 2, 0], [3, 2, 0, 1]),
    ([2, 0, 3, 1], [1, 0], [2, 1, 0, 3]),
    ([2, 0, 1], [], [2, 0, 1]),
])
def test_unused_parameters_keep_their_place(order, seen, result):
    assert order_module().merged(order, seen) == result


def test_merged_is_a_permutation_in_which_the_used_are_in_order():
    merged, draw = order_module().merged, random.Random(1)
    for _ in range(300):
        order = draw.sample(range(12), 12)
        seen = draw.sample(range(12), draw.randrange(13))
        result = merged(order, seen)
        assert sorted(result) == list(range(12))
        assert [i for i in result if i in seen] == seen
        assert merged(result, seen) == result


@pytest.mark.parametrize("words", [[1, 1, 2], [1, 2, 4], [0, 1, 2], [1, -2, 3], [5, 5, 5]])
def test_words_that_are_no_order_are_not_followed(words):
    order = order_module().Order(3, False)
    for _ in range(4):
        order.begin()
        order.heard(words)
        order.end()
    assert order.order == [0, 1, 2]


def test_after_a_fresh_start_it_is_said_again():
    """A rank that had joined has missed what was published meanwhile."""
    Order = order_module().Order
    order = Order(2, True)
    order.used(1)
    order.used(0)
    assert order.begin()[1] == [2, 1]
    order.begin_anew(True)
    order.used(1)
    order.used(0)
    assert order.begin()[1] == [2, 1]
    order.begin_anew(True, 3)
    for number in (1, 0, 2):
        order.used(number)
    assert order.begin()[1] == [2, 1, 3] and order.order == [0, 1, 2]


# --- on a job -----------------------------------------------------------------------------------------------


def train(seed, priorities):
    """Steps of a model whose forward uses its layers in another order than it names them; on rank 1 in yet another, and
    from the seventh step on in a third.  priorities: "order", or "random": each rank's own.
    Returns priorities step by step, by name, and the parameters."""
    import torch
    t = hvd()
    torch.manual_seed(seed)
    names = ["a", "b", "c", "d"]
    model = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8) for name in names})
    optimizer = t.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                                       named_parameters=model.named_parameters())
    draw, inputs = random.Random(t.rank()), torch.Generator().manual_seed(t.rank())
    seen = []
    for step in range(12):
        path = "cadb" if step < 6 else "dbca"
        if t.rank() == 1:
            path = path[::-1]
        if priorities == "random":
            for slot in optimizer._tally_slots:
                slot.priority = draw.randrange(-5, 5)
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=inputs)
        for name in path:
            x = torch.tanh(model[name](x))
        x.sum().backward()
        seen.append("".join(slot.name[0] for slot in sorted(optimizer._tally_slots[::2], key=lambda slot: -slot.priority)))
        optimizer.step()
    return seen, [p.detach().numpy().tobytes() for p in model.parameters()]


def test_all_ranks_follow_rank_0s_forward(four):
    """Its gradients of step 0 tell its order, which goes with step 1 and counts from step 3 on; on the others too, whose
    own is another."""
    results = four(train, 3, "order")
    assert [seen for seen, _ in results] == [["abcd"] * 3 + ["cadb"] * 6 + ["dbca"] * 3] * 4


def test_the_same_bits_whatever_the_priorities(four):
    right = four(train, 3, "order")
    mixed = four(train, 3, "random")
    assert len({tuple(values) for _, values in right + mixed}) == 1


def reduce_with_priorities(mixed):
    """Sums of tensors of several parts, in flight together; the bytes of the results."""
    import torch
    t = hvd()
    draw = random.Random(100 + t.rank())
    inputs = torch.Generator().manual_seed(t.rank())
    tensors = [torch.randn(300_000, generator=inputs) for _ in range(6)]
    order = draw.sample(range(6), 6) if mixed else range(6)
    handles = {i: t.allreduce_async(tensors[i], name="mixed.%d" % i, op=t.Sum,
                                    priority=draw.randrange(-9, 9) if mixed else 0) for i in order}
    return [t.synchronize(handles[i]).numpy().tobytes() for i in range(6)]


def test_ranks_with_other_priorities_get_the_same_sums(four):
    plain, mixed = four(reduce_with_priorities, False), four(reduce_with_priorities, True)
    assert all(one == plain[0] for one in plain + mixed)
