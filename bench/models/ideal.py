"""The least time of a training step whose gradients one server sums, and what order can bring at all.

The server takes a gradient from the moment when backward has made it, at a constant rate, and turns to a more urgent one at
once; a layer's forward waits for its own gradient alone.  Backward begins when forward has ended, so nothing is left of one
step when the next one's gradients come: one step is the steady state.  The most urgent is the layer that forward reaches
first (ByteScheduler, SOSP 2019, theorem 1); test/lab/test_models.py compares with all orders there are.
SPDX-License-Identifier: Apache-2.0
"""

import heapq


def finished(jobs):
    """When a server that always works on the most urgent job is through with each.  jobs: [(released, work)] in seconds, the
    most urgent first."""
    ends = [0.0] * len(jobs)
    coming = sorted((released, i) for i, (released, _) in enumerate(jobs))
    left = [work for _, work in jobs]
    ready, now, next_one = [], 0.0, 0
    while ready or next_one < len(coming):
        if not ready:
            now = max(now, coming[next_one][0])
        while next_one < len(coming) and coming[next_one][0] <= now:
            heapq.heappush(ready, coming[next_one][1])
            next_one += 1
        best = ready[0]
        until = coming[next_one][0] if next_one < len(coming) else float("inf")
        if now + left[best] <= until:
            now += left[best]
            ends[best] = now
            heapq.heappop(ready)
        else:
            left[best] -= until - now
            now = until
    return ends


def step(layers, seconds_per_byte):
    """Seconds of a step.  layers: [(bytes, seconds of forward, seconds of backward)] in the order of forward."""
    released, at = [0.0] * len(layers), 0.0
    for i in reversed(range(len(layers))):
        at += layers[i][2]
        released[i] = at
    ends = finished([(released[i], layers[i][0] * seconds_per_byte) for i in range(len(layers))])
    for end, (size, forward, _) in zip(ends, layers):
        at = (max(at, end) if size else at) + forward
    return at


def of_profile(profile, optimum_s):
    """The same of a Profile whose gradients take optimum_s alone."""
    layers = [(layer.bytes, layer.forward_s, layer.backward_s) for layer in profile.layers]
    return step(layers, optimum_s / sum(size for size, _, _ in layers))


def bound(forward_s, backward_s, communication_s):
    """How often as fast as without any overlap the best order can be: at most 2."""
    return (forward_s + backward_s + communication_s) / max(forward_s + backward_s, communication_s)
