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


def fill(cards, loads, total, copies):
    """Loads grown by `copies` bytes for each of `total` bytes that the cards share out, such that the busiest is as little busy
    as can be: all are raised to one level, found by halving."""
    low, high = 0.0, max(load / b for load, b in zip(loads, cards)) + copies * total / min(cards)
    for _ in range(200):
        level = (low + high) / 2
        if sum(max(0, level * b - load) for load, b in zip(loads, cards)) < copies * total:
            low = level
        else:
            high = level
    return [max(load, high * b) if copies else load for load, b in zip(loads, cards)]


def gathered(workers, pieces):
    """(bytes out, bytes in) of each worker's card where all get all pieces: a piece leaves its machine once, and whoever
    relays a byte sends the n - 2 copies that are still missing."""
    n, total = len(workers), sum(pieces)
    if n == 1:
        return [(0.0, 0.0)]
    return list(zip(fill(workers, pieces, total, n - 2), (total - piece for piece in pieces)))


def seconds(workers, loads):
    return max(max(load) / b for load, b in zip(loads, workers))


def all_gather(workers, pieces):
    """Seconds.  Spare machines do not help: every worker must get what it lacks, and give what it has."""
    return seconds(workers, gathered(workers, pieces))


def cards(operation, workers, services, total, ranks):
    """(bytes out, bytes in) of each worker's card in the least time, if every byte goes once to each machine, for so many
    ranks on each worker: of a tensor of `total` bytes, of an all-gather's result, or of what each rank gives in an all-to-all."""
    n, everybody = len(workers), sum(ranks)
    pieces = [total * r / everybody for r in ranks]
    rooted = [total] + [0] * (n - 1)
    if operation == "all-reduce":
        least = optimum(workers, services, total)
        shares = [max(0, least * b / total - 1) / max(1, n - 2) for b in workers] + [least * b / total / n for b in services]
        shares = shares if n > 2 and sum(shares) else [1 / n] * n
        return [(b, b) for b in traffic(n, [x / sum(shares) for x in shares], total)[:n]]
    if operation == "all-to-all":
        return [(piece * (everybody - r), piece * (everybody - r)) for piece, r in zip(pieces, ranks)]
    out_and_in = gathered(workers, rooted if operation in ("broadcast", "reduce") else pieces)
    # Sums go the ways of copies backwards.
    return [load[::-1] for load in out_and_in] if operation.startswith("reduce") else out_and_in


def collective(operation, workers, services, total, ranks=None):
    """Seconds that the cards need at least for cards(); one rank on each worker unless told.  Spare machines help the
    all-reduce alone."""
    if operation == "all-reduce":
        return optimum(workers, services, total)
    return seconds(workers, cards(operation, workers, services, total, ranks or [1] * len(workers)))
