#!/usr/bin/env python3
"""Where processor time goes in a collective, by thread, system call and frame, beside Gloo and OpenMPI.

    bench/cost/cost.py -n 4 -k 0 2 4 --parts 8K 32K 128K 512K 1M --bytes 64M --json FILE
    bench/cost/cost.py --layouts 4x2 --operations all-reduce all-gather --look calls samples
    bench/cost/cost.py --quick

README.md beside this file says what the columns mean.  Needs root (test/lab/lab.py says what else), and perf for system
calls.  SPDX-License-Identifier: Apache-2.0
"""

import pathlib
import statistics
import sys
import tempfile
from collections import Counter

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "collectives"), str(HERE.parent / "goodput")]

import collectives  # noqa: E402
import goodput  # noqa: E402
import optimum  # noqa: E402
import stream  # noqa: E402
import systems  # noqa: E402
import traced  # noqa: E402
import usage  # noqa: E402
from systems import LabError  # noqa: E402

OPERATIONS = ["all-reduce", "all-gather", "reduce-scatter", "broadcast"]
LOOKS = ["times", "calls", "samples"]
WORTH_A_LINE = 0.01  # of all processor time, or calls


class Times:
    """Processor time and switches, from /proc."""

    def __init__(self, lab):
        self.lab, self.before, self.pids, self.pairs = lab, None, None, []

    def begin(self):
        self.pids = self.pids or usage.of_jobs(self.lab.pids())
        self.before = usage.Snapshot(self.pids)

    def end(self):
        self.pairs.append((self.before, usage.Snapshot(self.pids)))

    def close(self):
        pass

    def results(self, window_of):
        found = {}
        for window, pair in enumerate(self.pairs):
            found.setdefault(window_of(window), usage.Used()).add(*pair)
        return {key: {"roles": {name: dict(zip(("cpu_s", "kernel_s", "sleeps", "preemptions"), numbers))
                                for name, numbers in used.roles.items() if any(numbers)},
                      "machine_s": dict(zip(("user", "kernel", "hard", "soft", "idle"), used.machine)),
                      "packets": used.packets}
                for key, used in found.items()}


class Trace:
    """What perf records of the timed iterations."""

    def __init__(self, lab, folder, options):
        self.lab, self.recorder, self.roles = lab, traced.Recorder(folder, options), {}

    def begin(self):
        if not self.recorder.process:
            pids = usage.of_jobs(self.lab.pids())
            self.roles = usage.Snapshot(pids).roles
            self.recorder.start(pids)
        self.recorder.begin()

    def end(self):
        self.recorder.end()

    def close(self):
        self.recorder.stop()


class Calls(Trace):
    """System calls, sleeps in them, frames."""

    def __init__(self, lab, folder, probes):
        super().__init__(lab, folder, [*traced.COUNTS, *(word for name in probes.names for word in ("-e", name))])

    def results(self, window_of):
        types = traced.frame_names(systems.ROOT / "src" / "wire" / "frame.h")
        counters = traced.count(self.recorder, self.roles, types, window_of)
        return {key: {"calls": {name: {call: dict(numbers) for call, numbers in calls.items()}
                                for name, calls in counter.calls.items()},
                      "outside_s": dict(counter.seconds),
                      "frames": {name: {f"{way} {kind}": number for (way, kind), number in frames.items()}
                                 for name, frames in counter.frames.items()}}
                for key, counter in counters.items()}


class Samples(Trace):
    """Functions in which processors were."""

    def __init__(self, lab, folder):
        super().__init__(lab, folder, traced.SAMPLES)

    def results(self, window_of):
        found = traced.samples(self.recorder, self.roles, window_of)
        return {key: {"samples_s": [[*place, seconds] for place, seconds in functions.most_common()]}
                for key, functions in found.items()}


def repeats(total):
    """How often each.c performs an operation of so many bytes in an iteration."""
    return max(1, min(8, (32 << 20) // total))


def observe(lab, cluster, system, k, entries, arguments, look, probes):
    """{(operation, bytes): what was seen of it, over all its iterations}."""
    workers, services = cluster.hosts[: cluster.n], cluster.hosts[cluster.n :][:k]
    everybody = sum(lab.rank_counts(workers, system.ranks).values())
    tensors = [(name, total // 4 // everybody * everybody) for name, total in entries]
    of_window = [entry for entry in entries for _ in range(arguments.iterations * repeats(entry[1]))]
    with tempfile.TemporaryDirectory(prefix="cost-") as folder:
        seen = {"times": lambda: Times(lab), "calls": lambda: Calls(lab, folder, probes),
                "samples": lambda: Samples(lab, folder)}[look]()
        try:
            with usage.Observer(folder, seen.begin, seen.end):
                numbers = (arguments.iterations, arguments.warm_up)
                lines, _ = system.launch(lab, workers, services, tensors, numbers, system.variants[0])
        finally:
            seen.close()
        found = seen.results(lambda window: of_window[window])
    for place, entry in enumerate(entries):
        ranks = [told[place] for told in lines]
        seconds = [max(times) for times in zip(*(rank["seconds"] for rank in ranks))]
        found.setdefault(entry, {}).update(
            {"time_s": statistics.median(seconds), "iterations": len(seconds), "ranks": len(ranks),
             "wrong": sum(rank["wrong"] for rank in ranks), "version": ranks[0]["report"]["version"],
             "part_bytes": ranks[0]["report"].get("part_bytes")})
    return found


def of_each(value, way):
    """The numbers in a result, however deep, made something else of."""
    if isinstance(value, dict):
        return {name: of_each(part, way) for name, part in value.items()}
    if isinstance(value, list):
        return [of_each(part, way) for part in value]
    return way(value) if isinstance(value, (int, float)) else value


def row_of(entry, found, cluster, layout, k, name, look, bandwidth, part):
    """part: the size of parts that was set, or None: then parts are of several sizes, and none has a figure."""
    operation, total = entry
    b = [bandwidth[h] for h in cluster.hosts]
    gigabytes = found["iterations"] * total / 1e9
    best = optimum.collective(operation, b[: cluster.n], b[cluster.n :][:k], total, layout)
    seen = {key: of_each(found.pop(key), lambda number: number / gigabytes)
            for key in ("roles", "machine_s", "packets", "calls", "outside_s", "frames", "samples_s") if key in found}
    return {"bench": "cost", "look": look, "system": name, "operation": operation, "bytes": total, "n": cluster.n, "k": k,
            "layout": layout, **found, "fraction": best / found["time_s"],
            "parts_per_gb": 1e9 / found["part_bytes"] if part and found["part_bytes"] else None, "per_gb": seen, "rate": cluster.rate}


# --- what is printed ---------------------------------------------------------------------------------


def per_part(row, number):
    """Of a number for a GB: millionths for each part and rank."""
    return 1e6 * number / row["parts_per_gb"] / row["ranks"] if row["parts_per_gb"] else None


def show_times(row):
    roles, machine = row["per_gb"]["roles"], row["per_gb"]["machine_s"]
    of_jobs = sum(used["cpu_s"] for used in roles.values())
    for name, used in sorted(roles.items(), key=lambda item: -item[1]["cpu_s"]):
        if used["cpu_s"] >= WORTH_A_LINE * of_jobs:
            print(f"    {name:18} {used['cpu_s']:8.2f} s/GB {used['kernel_s']:8.2f} in the kernel {used['sleeps']:10.0f} sleeps "
                  f"{used['preemptions']:8.0f} preemptions {goodput.figure(per_part(row, used['cpu_s']), 8, 1)} us/part")
    busy = sum(seconds for name, seconds in machine.items() if name != "idle")
    print(f"    {'all':18} {of_jobs:8.2f} s/GB; the machine {busy:.2f} s/GB: {machine['user']:.2f} as users, {machine['kernel']:.2f} in the "
          f"kernel, {machine['soft']:.2f} in soft interrupts; {row['per_gb']['packets']:.0f} packets/GB")


def show_calls(row):
    calls = row["per_gb"]["calls"]
    everything = sum(call["calls"] for of_role in calls.values() for call in of_role.values())
    for name, of_role in sorted(calls.items(), key=lambda item: -sum(call["calls"] for call in item[1].values())):
        for call, seen in sorted(of_role.items(), key=lambda item: -item[1]["calls"]):
            if seen["calls"] >= WORTH_A_LINE * everything:
                each = 1e6 * seen["seconds"] / seen["calls"]
                print(f"    {name:18} {call:16} {seen['calls']:9.0f}/GB {goodput.figure(per_part(row, seen['calls'] / 1e6), 7, 2)}/part "
                      f"{seen['again']:8.0f} again {seen['nothing']:8.0f} nothing {seen['sleeps']:8.0f} sleeps "
                      f"{seen['results'] / seen['calls']:9.1f} result {seen['seconds']:7.2f} s/GB {each:7.1f} us each")
    for name, frames in row["per_gb"]["frames"].items():
        told = "  ".join(f"{kind} {number:.0f}" for kind, number in sorted(frames.items(), key=lambda item: -item[1])
                         if number >= WORTH_A_LINE * sum(frames.values()))
        print(f"    {name:18} frames/GB: {told}")
    for name, seconds in sorted(row["per_gb"]["outside_s"].items(), key=lambda item: -item[1]):
        print(f"    {name:18} {seconds:7.2f} s/GB outside of system calls")


def show_samples(row):
    samples = row["per_gb"]["samples_s"]
    everything = sum(seconds for *_, seconds in samples)
    wholes, functions = Counter(), Counter()
    for name, where, function, seconds in samples:
        wholes[f"{name:18} {where}"] += seconds
        functions[f"{'of all':18} {where.partition(':')[0]}: {function}"] += seconds
    for what, seconds in [*wholes.most_common(), *functions.most_common()]:
        if seconds >= WORTH_A_LINE * everything:
            print(f"    {seconds:7.2f} s/GB {100 * seconds / everything:5.1f}% {goodput.figure(per_part(row, seconds), 7, 2)} us/part  {what}")


def show(row):
    part = f", parts of {row['part_bytes']} bytes" if row["parts_per_gb"] else ""
    print(f"\n{row['operation']} of {row['bytes']} bytes, {collectives.layout_text(row['layout'])} ranks, k = {row['k']}, "
          f"{row['system']} {row['version']}{part}: {row['time_s']:.4f} s, {row['fraction']:.4f} of the optimum ({row['look']})")
    {"times": show_times, "calls": show_calls, "samples": show_samples}[row["look"]](row)
    sys.stdout.flush()


def fit(points):
    """(a, b) of y = a + b x with the least sum of squared relative errors, for points (x, y)."""
    weights = [1 / y**2 if y else 0 for _, y in points]
    w = sum(weights)
    if not w:
        return 0.0, 0.0
    x, y = (sum(p[i] * weight for p, weight in zip(points, weights)) / w for i in (0, 1))
    spread = sum(weight * (p[0] - x) ** 2 for p, weight in zip(points, weights))
    slope = sum(weight * (p[0] - x) * (p[1] - y) for p, weight in zip(points, weights)) / spread if spread else 0.0
    return y - slope * x, slope


def flat(value, name=()):
    """{(words of the way to it): number} of nested dictionaries."""
    if isinstance(value, dict):
        return {way: number for key, part in value.items() for way, number in flat(part, (*name, key)).items()}
    return {name: value}


def show_fits(rows):
    """What a byte and a part cost, where several part sizes were measured."""
    groups = {}
    for row in rows:
        if row["parts_per_gb"] and row["look"] != "samples":
            key = (row["look"], row["operation"], row["bytes"], tuple(row["layout"]), row["k"])
            groups.setdefault(key, []).append(row)
    for (look, operation, total, layout, k), of_group in groups.items():
        if len({row["part_bytes"] for row in of_group}) < 3:
            continue
        print(f"\n{operation} of {total} bytes, {collectives.layout_text(list(layout))} ranks, k = {k}: for each GB, and for each part and rank ({look})")
        kinds = [flat({key: row["per_gb"][key] for key in ("roles", "calls", "frames", "outside_s") if key in row["per_gb"]})
                 for row in of_group]
        for way in sorted({way for of_row in kinds for way in of_row}):
            if way[-1] in ("again", "nothing", "results", "kernel_s", "preemptions"):
                continue
            scale = 1e6 if way[-1] in ("cpu_s", "seconds") or way[0] == "outside_s" else 1
            points = [(row["parts_per_gb"] * row["ranks"], of_row.get(way, 0)) for row, of_row in zip(of_group, kinds)]
            a, b = fit(points)
            if max(scale * b, 0) > 0.02 or a > 0.05 and scale > 1:
                print(f"    {' '.join(way):50} {a:10.2f} + {scale * b:8.2f}{' us' if scale > 1 else ''}/part")


# --- command line ------------------------------------------------------------------------------------


def part_size(text):
    """None of "rule"."""
    return None if text == "rule" else goodput.size(text)


def parse():
    parser = collectives.parser_for("where processor time goes in collectives on an emulated cluster", OPERATIONS, "4", "0", "64M", 3)
    parser.add_argument("--parts", type=part_size, nargs="+", default=[None], metavar="BYTES",
                        help="TALLY_PART_BYTES; 'rule' is what Tally chooses (rule)")
    parser.add_argument("--look", nargs="+", choices=LOOKS, default=LOOKS[:2], help="at times, at system calls, at functions (times calls)")
    parser.add_argument("--quick", action="store_true", help="n = 2, 200 Mbit/s, 1 MB, an iteration")
    arguments = collectives.parsed(parser, ([4], [2]), ([64], [1]), (3, 1))
    arguments.k = arguments.k or [0]
    return arguments


def cluster_rows(lab, cluster, layout, arguments, looks, probes):
    """The rows of one cluster, as they come."""
    bandwidth = stream.bandwidths(lab, cluster.hosts, 1 if arguments.quick else 3)
    entries = [(operation, size) for operation in arguments.operations for size in arguments.bytes]
    given = dict(word.split("=", 1) for word in arguments.set)
    for look in looks:
        for part in arguments.parts:
            settings = {**given, "TALLY_PART_BYTES": str(part)} if part else given
            for name, system in systems.available(arguments, settings, collectives.SYSTEMS).items():
                if name != "tally" and part != arguments.parts[0]:
                    continue
                system.ranks = dict(zip(cluster.hosts, layout))
                for k in cluster.ks if system.services else [0]:
                    found = observe(lab, cluster, system, k, entries, arguments, look, probes)
                    for entry in entries:
                        yield row_of(entry, found[entry], cluster, layout, k, name, look, bandwidth,
                                     settings.get("TALLY_PART_BYTES"))


def main():
    arguments = parse()
    if systems.why_not():
        sys.exit(f"cost: {systems.why_not()}")
    looks = arguments.look
    if traced.why_not() and looks != ["times"]:
        print(f"without system calls and functions: {traced.why_not()}", file=sys.stderr)
        looks = ["times"]
    rows = systems.Rows(arguments.json)
    binaries = [systems.built("meson/libtally.so", "libtally.so"), systems.built("bin/tallyd", "src/tallyd/tallyd")]
    with traced.Probes(*(pathlib.Path(b).resolve() for b in binaries if b and "calls" in looks)) as probes:
        for layout in arguments.layouts:
            cluster = goodput.Cluster(len(layout), arguments.k, arguments.rate, [], burst=arguments.burst)
            with cluster.lab() as lab:
                for row in cluster_rows(lab, cluster, layout, arguments, looks, probes):
                    show(row)
                    rows.add(row)
    show_fits(rows)
    return 1 if any(row["wrong"] for row in rows) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LabError, ValueError) as problem:
        sys.exit(f"cost: {problem}")
