#!/usr/bin/env python3
"""Goodput over the number of CPU machines, on the emulated cluster, beside the optimum and Gloo's ring.

    bench/goodput/goodput.py [--quick] [--json FILE]                  # n = 8, k = 0 … 8 at 1 Gbit/s: minutes
    bench/goodput/goodput.py -n 4 -k 0 2 4 --rate 200mbit --bytes 16M --set TALLY_PART_BYTES=48K

An iteration's time is that of its slowest rank; the figure is the median over iterations behind the warm-up.
The optimum is Eq. 6 of BytePS, 2n(n-1)M / ((n² + kn - 2k)B), for k >= n M/B, with B the goodput of one TCP
stream between two of the hosts, measured in the same run (median over slices of 0.1 s, the best of three).
`fraction` is optimum / median and `least` optimum / fastest iteration; `worst` the slowest iteration / median;
`traffic` what the links carried over what the plan says (Eq. 1 to 4), for the link that is furthest off; `cpu` the
ranks' CPU seconds (not the services' machines') for each 10⁹ bytes of M.

Needs root (test/lab/lab.py says what else).  Gloo's rows need an interpreter with PyTorch: --gloo PYTHON, by
default this one where it has it.  SPDX-License-Identifier: Apache-2.0
"""

import argparse
import importlib.util
import json
import os
import pathlib
import re
import socket
import statistics
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "test" / "lab"))

from lab import Lab, LabError, why_not  # noqa: E402

BUILD = pathlib.Path(os.environ.get("TALLY_TEST_BUILD", ROOT / "build"))
STREAM_PORT, STREAM_SECONDS, STREAM_WARM_UP = 5001, 2.0, 0.5


def built(*names):
    for name in names:
        if (BUILD / name).exists():
            return str(BUILD / name)
    sys.exit(f"goodput: there is no {names[0]} in {BUILD}; run make first")


def size(text):
    match = re.fullmatch(r"(\d+)([KMG]?)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"'{text}' is no size; one looks like 16M")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


# --- the plan ---------------------------------------------------------------------------------------


def optimum(n, k, total, bandwidth):
    """Seconds (Eq. 6)."""
    if k >= n:
        return total / bandwidth
    return 2 * n * (n - 1) * total / ((n * n + k * n - 2 * k) * bandwidth)


def link_bytes(n, k, total):
    """(a worker's link, a CPU machine's link), each way (Eq. 1 to 4)."""
    if k >= n:
        return total, n * total / k
    parts = n * n + k * n - 2 * k
    return total + (n - 2) * total * (n - k) / parts, n * total * 2 * (n - 1) / parts


# --- point to point ---------------------------------------------------------------------------------


def stream_out(address):
    end = time.monotonic() + STREAM_SECONDS
    with socket.socket() as s:
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        s.connect((address, STREAM_PORT))
        chunk = bytes(1 << 20)
        while time.monotonic() < end:
            s.sendall(chunk)


def stream_in():
    """Prints bytes/s: the median over slices of 0.1 s."""
    with socket.create_server(("", STREAM_PORT)) as listener:
        print("listening", flush=True)
        peer = listener.accept()[0]
    buffer = bytearray(1 << 18)
    begin = mark = time.monotonic()
    got, slices = 0, []
    while n := peer.recv_into(buffer):
        got += n
        now = time.monotonic()
        if now - mark >= 0.1:
            if now - begin > STREAM_WARM_UP:
                slices.append(got / (now - mark))
            mark, got = now, 0
    print(statistics.median(slices))


def point_to_point(lab, a, b):
    """The best of three: a busy machine only ever takes something away."""
    return max(stream(lab, a, b) for _ in range(3))


def stream(lab, a, b):
    sink = lab.start(b, [sys.executable, __file__, "_stream_in"])
    while "listening" not in sink.output():
        if sink.poll() is not None:
            raise LabError(sink.output())
        time.sleep(0.01)
    source = lab.run(a, [sys.executable, __file__, "_stream_out", lab.address(b)])
    result = sink.wait(30)
    if source.status or result.status:
        raise LabError(source.output + result.output)
    return float(result.output.split()[-1])


# --- one cell of the table ---------------------------------------------------------------------------


def measure(lab, system, n, k, total, arguments, settings):
    """A dict: what the table's row says and more."""
    workers, services = [f"w{i}" for i in range(n)], [f"c{i}" for i in range(k)]
    numbers = [arguments.iterations, arguments.warm_up, total // 4]
    if system == "gloo":
        argv, env = [arguments.gloo, HERE / "gloo.py", *numbers], {"GLOO_SOCKET_IFNAME": "eth0"}
    else:
        argv = [built("meson/bench/goodput/goodput", "bench/goodput/goodput"), *numbers]
        env = {"TALLY_LOG": "warning", **settings}
    job = lab.job(argv, workers, services, built("bin/tallyd", "src/tallyd/tallyd"), env=env, timeout_s=3600, apart=True)
    if not job.ok:
        raise LabError(f"{system}, k = {k}:\n{job}")
    ranks = [json.loads(r.output.splitlines()[-1]) for r in job.ranks]
    seconds = [max(times) for times in zip(*(r["seconds"] for r in ranks))]
    rounds = arguments.iterations + arguments.warm_up
    on_worker, on_service = link_bytes(n, k, total * rounds)
    ratios = [
        moved / (on_worker if host in workers else on_service)
        for host in workers + services
        for moved in job.traffic[host]
    ]
    return {
        "bench": "goodput",
        "system": system,
        "version": ranks[0]["report"]["version"],
        "n": n,
        "k": k,
        "bytes": total,
        "time_s": statistics.median(seconds),
        "least_s": min(seconds),
        "iterations_s": seconds,
        "worst": max(seconds) / statistics.median(seconds),
        "cpu_s_per_gb": sum(map(sum, (r["cpu_seconds"] for r in ranks))) / (arguments.iterations * total / 1e9),
        "traffic": max(ratios, key=lambda r: abs(r - 1)),
        "wrong": sum(r["wrong"] for r in ranks),
        "report": ranks[0]["report"],
        "warnings": "".join(r.error for r in job.ranks + job.services),
    }


HEADER = (
    f"{'bytes':>10} {'n':>3} {'k':>3} {'system':7} {'median s':>9} {'optimum s':>9} {'fraction':>8} {'least':>7} "
    f"{'worst':>6} {'traffic':>7} {'cpu':>6}  version"
)


def show(row):
    print(
        f"{row['bytes']:10} {row['n']:3} {row['k']:3} {row['system']:7} {row['time_s']:9.4f} {row['optimum_s']:9.4f} "
        f"{row['fraction']:8.4f} {row['optimum_s'] / row['least_s']:7.4f} {row['worst']:6.2f} {row['traffic']:7.4f} "
        f"{row['cpu_s_per_gb']:6.2f}  {row['version']}",
        flush=True,
    )
    if row["warnings"]:
        print(row["warnings"], file=sys.stderr)


def parse():
    parser = argparse.ArgumentParser(description="goodput on an emulated cluster against the optimum")
    parser.add_argument("-n", type=int, help="worker machines (8)")
    parser.add_argument("-k", type=int, nargs="*", help="CPU machines (0 to n)")
    parser.add_argument("--rate", help="of every card (1gbit)")
    parser.add_argument("--bytes", type=size, nargs="*", help="of gradients (128M 16M)")
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="a setting of Tally's")
    parser.add_argument("--gloo", metavar="PYTHON", help="an interpreter with PyTorch, or `no`")
    parser.add_argument("--quick", action="store_true", help="n = 4, k = 0 2 4, 200 Mbit/s, 16 MB: seconds")
    parser.add_argument("--json", metavar="FILE", help="write the rows, one object a line")
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.n = arguments.n or (4 if quick else 8)
    if arguments.k is None:
        arguments.k = [0, 2, 4] if quick else list(range(arguments.n + 1))
    arguments.rate = arguments.rate or ("200mbit" if quick else "1gbit")
    arguments.bytes = arguments.bytes or ([16 << 20] if quick else [128 << 20, 16 << 20])
    arguments.iterations = arguments.iterations or (3 if quick else 10)
    if not arguments.gloo and importlib.util.find_spec("torch"):
        arguments.gloo = sys.executable
    return arguments


def main():
    if sys.argv[1:2] == ["_stream_in"]:
        return stream_in()
    if sys.argv[1:2] == ["_stream_out"]:
        return stream_out(sys.argv[2])
    arguments = parse()
    if why_not():
        sys.exit(f"goodput: {why_not()}")
    settings = dict(word.split("=", 1) for word in arguments.set)
    n, most = arguments.n, max(arguments.k)
    hosts = [f"w{i}" for i in range(n)] + [f"c{i}" for i in range(most)]
    if arguments.json:
        pathlib.Path(arguments.json).write_text("", encoding="utf-8")
    with Lab(hosts, arguments.rate, congestion="cubic") as lab:
        bandwidth = point_to_point(lab, "w0", "w1")
        print(f"B = {bandwidth / 1e6:.3f} MB/s from host to host; {arguments.rate} cards {' '.join(arguments.set)}")
        print(HEADER)
        for total in arguments.bytes:
            cells = [("tally", k) for k in arguments.k]
            if arguments.gloo and arguments.gloo != "no":
                cells.insert(0, ("gloo", 0))
            for system, k in cells:
                row = measure(lab, system, n, k, total, arguments, settings)
                row["optimum_s"] = optimum(n, k, total, bandwidth)
                row["fraction"] = row["optimum_s"] / row["time_s"]
                row["b_bytes_per_s"] = bandwidth
                row["rate"], row["settings"] = arguments.rate, settings if system == "tally" else {}
                show(row)
                if arguments.json:
                    with open(arguments.json, "a", encoding="utf-8") as out:
                        out.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LabError as problem:
        sys.exit(f"goodput: {problem}")
