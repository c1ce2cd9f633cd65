"""The least time that network cards allow, and who then sums what: solved here anew, so that the benchmark does not
measure Tally's plan (src/plan) by itself.  Bandwidths in bytes/s, times in seconds.

Machine i sums the share x_i of M bytes.  A worker sends, and receives, M (1 + (n-2) x_i) bytes: what others sum, and
the sums of its own share to n-1 others.  A CPU machine sends, and receives, n M x_i.  Sought is the least T in which
all cards can carry that with shares that add up to 1 (BytePS, OSDI 2020, Eq. 1 to 6, has it for equal cards).
SPDX-License-Identifier: Apache-2.0
"""


def optimum(workers, services, total):
    """Seconds, for lists of bandwidths."""
    n = len(workers)
    if n == 1:
        return 0.0
    least = total / min(workers)  # every worker receives every sum
    if n == 2:
        return least  # whoever sums, a worker's card carries M
    # The largest share that a worker carries within T is (T b / M - 1) / (n - 2), a CPU machine T b / (n M); from
    # `least` on none is negative, so they add up to 1 at the T of one linear equation.
    per_second = sum(workers) / (n - 2) + sum(services) / n
    return max(least, total * (1 + n / (n - 2)) / per_second)


def traffic(n, shares, total):
    """Bytes on every machine's link each way, the n workers' first, where `shares` of the total are summed."""
    if n == 1:
        return [0.0] * len(shares)
    return [total * (1 + (n - 2) * x) if i < n else total * n * x for i, x in enumerate(shares)]


def ring(n, total):
    """The same for a ring, or any all-reduce that sends least."""
    return [2 * (n - 1) / n * total] * n


def all_gather(workers, pieces):
    """Worker i sends its piece at least once, and receives all others; relays of workers' own services reach that."""
    total = sum(pieces)
    return max(max(piece, total - piece) / b for b, piece in zip(workers, pieces))


def collective(operation, workers, services, total, ranks=1):
    """Seconds that the cards of workers, with so many ranks each, need at least for an operation on `total` bytes: a tensor's,
    or an all-gather's result, or what each rank gives in an all-to-all.  Spare machines help the all-reduce alone."""
    n = len(workers)
    if operation == "all-reduce":
        return optimum(workers, services, total)
    if operation in ("broadcast", "reduce"):
        return total / min(workers)  # once into every card, or out of it
    pieces = [total / n] * n
    if operation == "all-to-all":
        return ranks * all_gather(workers, pieces)
    return all_gather(workers, pieces)  # a reduce-scatter is one backwards
