"""The systems that goodput.py compares: how each is started on the emulated cluster, and what it printed.

Each rank is a program that prints one JSON object (rank.h); a System starts one on every worker.  As `agent HOST
COMMAND` this file is also what mpirun takes for ssh.  SPDX-License-Identifier: Apache-2.0
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "test" / "lab"))

from lab import Host, Lab, LabError, enter, processes, why_not  # noqa: E402, F401

BUILD = pathlib.Path(os.environ.get("TALLY_TEST_BUILD", ROOT / "build"))
PATIENCE_S = 3600
# DistributedDataParallel's buckets: the first, which must not make the network wait, and the others.
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
TRIAL_WARM_UP, TRIAL_ITERATIONS = 1, 2


def built(*names):
    return next((str(BUILD / name) for name in names if (BUILD / name).exists()), None)


def setting(text):
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"it takes NAME=VALUE, not '{text}'")
    return text


def add_arguments(parser, quick):
    """Add what all benchmarks with Python in their ranks take.  quick: what --quick does."""
    parser.add_argument("--set", metavar="NAME=VALUE", type=setting, action="append", default=[], help="a setting of Tally's")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with PyTorch (this)")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", metavar="FILE", help="write the rows, one object a line")


def buckets(tensors):
    """The list as DistributedDataParallel puts it together, in the order of backward: a bucket is full as soon as it
    has its bytes."""
    full, room = [[]], FIRST_BUCKET_BYTES
    for _, count in tensors:
        if 4 * sum(full[-1]) >= room:
            full.append([])
            room = BUCKET_BYTES
        full[-1].append(count)
    return [(f"bucket.{i}", sum(counts)) for i, counts in enumerate(full)]


def machine_cpu_s(ranks):
    """Seconds that all processors of the machine have worked in the ranks' timed iterations.

    Each rank has read /proc/stat at its own begin and end; the one that was timed longest has seen most: the root of a
    broadcast ends before the others."""
    return max(ranks, key=lambda rank: sum(rank["seconds"]))["busy"] / os.sysconf("SC_CLK_TCK")


class Rows(list):
    """The rows of a benchmark.  add() also writes them into a file (None: into none), one JSON object a line, as they come."""

    def __init__(self, path):
        super().__init__()
        self.path = path
        if path:
            pathlib.Path(path).write_text("", encoding="utf-8")

    def add(self, row):
        self.append(row)
        if self.path:
            with open(self.path, "a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")


class System:
    """One of those compared.  Class attributes: `services`, it uses CPU machines; `services_needed`, it has no way
    without; `settings`, Tally's settings that make it, None for other systems; `variants`, ways to start it of which
    the best counts."""

    services = services_needed = False
    settings = None
    variants = ("",)

    def __init__(self, arguments, given):
        self.arguments, self.given = arguments, given
        self.ranks = arguments.ranks_per_machine  # or {worker: its ranks}

    def lacks(self):
        """What is missing here to run it, or None."""
        return None

    def run(self, lab, workers, services, command, variant):
        """(standard outputs of all ranks, what the programs complained about).  `command`: see `arguments_for`."""
        raise NotImplementedError

    def tensors(self, work):
        return buckets(work.tensors)

    def shares(self, lab, hosts, report):
        """What each host sums of the whole, or None for a ring."""
        return None

    def measure(self, lab, workers, services, work, arguments):
        """What it says in a row of the table and `moved`, {host: (bytes sent, received)}; and its shares."""
        variant = self.variants[0]
        if len(self.variants) > 1 and not arguments.quick:
            numbers = (TRIAL_ITERATIONS, TRIAL_WARM_UP)
            tried = {v: self.once(lab, workers, services, work, numbers, v)["time_s"] for v in self.variants}
            variant = min(tried, key=tried.get)
        row = self.once(lab, workers, services, work, (arguments.iterations, arguments.warm_up), variant)
        return row, self.shares(lab, workers + services, row["report"])

    def once(self, lab, workers, services, work, numbers, variant):
        before = lab.counters()
        lines, warnings = self.launch(lab, workers, services, self.tensors(work), numbers, variant)
        after = lab.counters()
        ranks = [told[-1] for told in lines]
        seconds = [max(times) for times in zip(*(r["seconds"] for r in ranks))]
        median = statistics.median(seconds)
        gigabytes = len(seconds) * work.bytes / 1e9
        return {
            "version": ranks[0]["report"]["version"],
            "variant": variant,
            "time_s": median,
            "least_s": min(seconds),
            "iterations_s": seconds,
            "worst": max(seconds) / median,
            "cpu_s_per_gb": sum(map(sum, (r["cpu_seconds"] for r in ranks))) / gigabytes,
            "machine_cpu_s_per_gb": machine_cpu_s(ranks) / gigabytes,
            "busy": ranks[0]["busy"] / ranks[0]["ticks"] if ranks[0]["ticks"] else None,
            "wrong": sum(r["wrong"] for r in ranks),
            "report": ranks[0]["report"],
            "warnings": warnings,
            "moved": {h: tuple(b - a for a, b in zip(before[h], after[h])) for h in after},
        }


    def launch(self, lab, workers, services, tensors, numbers, variant):
        """Run a job over a list of tensors: (the JSON objects that each rank has printed, warnings)."""
        with tempfile.NamedTemporaryFile("w", prefix="goodput-", suffix=".list") as listing:
            listing.writelines(f"{count} {name}\n" for name, count in tensors)
            listing.flush()
            outputs, warnings = self.run(lab, workers, services, [*map(str, numbers), listing.name], variant)
        lines = [[json.loads(line) for line in output.splitlines() if line.startswith("{")] for output in outputs]
        return sorted(lines, key=lambda told: told[-1]["rank"]), warnings


def outputs_of(job):
    if not job.ok:
        raise LabError(str(job))
    return [r.output for r in job.ranks], "".join(r.error for r in job.ranks + job.services)


class Tally(System):
    services = True
    settings = {}
    program = ("meson/bench/goodput/goodput", "bench/goodput/goodput")

    def lacks(self):
        for names in (self.program, ("bin/tallyd", "src/tallyd/tallyd")):
            if not built(*names):
                return f"there is no {names[0]} in {BUILD}; run make first"
        unknown = set(self.settings) - self.known()
        return f"this Tally does not know {', '.join(unknown)}" if unknown else None

    @staticmethod
    def known():
        """The names of Tally's settings."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TALLY_")}
        argv = [built("bin/tally", "src/cli/tally"), "params"]
        said = subprocess.run(argv, env=clean, capture_output=True, text=True, check=True)
        return {word for word in said.stdout.split() if word.startswith("TALLY_")}

    def run(self, lab, workers, services, command, variant):
        bandwidth = "TALLY_BANDWIDTH" in self.known()  # no virtual card tells its own

        def environment(host):
            of_card = {"TALLY_BANDWIDTH": f"{lab.rate(host) / 1e6:g}M"} if bandwidth else {}
            return {"TALLY_LOG": "warning", **of_card, **self.settings, **self.given}

        argv = [built(*self.program), *command]
        tallyd = built("bin/tallyd", "src/tallyd/tallyd")
        return outputs_of(
            lab.job(argv, workers, services, tallyd, self.ranks, environment, timeout_s=PATIENCE_S, apart=True)
        )

    def tensors(self, work):
        return work.tensors  # as training submits them

    def shares(self, lab, hosts, report):
        share = {service["address"]: service["share"] for service in report["services"]}
        return [share[lab.address(host)] for host in hosts]


class AllReduce(Tally):
    settings = {"TALLY_SPLIT": "all-reduce"}


class Server(Tally):
    services_needed = True
    settings = {"TALLY_SPLIT": "server"}


class Gloo(System):
    """torch.distributed.all_reduce, which is Gloo's ring; variants: so many rings in parallel."""

    variants = ("1 ring", "2 rings", "4 rings")
    program = HERE / "gloo.py"

    def lacks(self):
        probe = [self.arguments.gloo, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"]
        if subprocess.run(probe, check=False).returncode:
            return f"{self.arguments.gloo} has no PyTorch; --gloo PYTHON names one that has"
        return None

    def run(self, lab, workers, services, command, variant):
        argv = [self.arguments.gloo, self.program, *command, variant.split()[0]]
        env = {"GLOO_SOCKET_IFNAME": "eth0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        return outputs_of(lab.job(argv, workers, ranks_per_host=self.ranks, env=env, timeout_s=PATIENCE_S, apart=True))


class OpenMpi(System):
    """MPI_Allreduce over TCP, by mpirun on the first worker, which reaches the others as it would by ssh; variants:
    the rings, which are made for large tensors, and its own choice of algorithm."""

    variants = ("ring", "segmented ring", "its choice")
    algorithms = {"ring": {"allreduce_algorithm": 4}, "segmented ring": {"allreduce_algorithm": 5}}
    program = ("meson/bench/goodput/goodput_mpi", "bench/goodput/goodput_mpi")

    def lacks(self):
        if not shutil.which("mpirun"):
            return "there is no mpirun"
        if not built(*self.program):
            return f"{self.program[0]} was not built: the build found no OpenMPI (libopenmpi-dev)"
        return None

    def run(self, lab, workers, services, command, variant):
        options = {
            "plm_rsh_agent": f"{sys.executable} {HERE / 'systems.py'} agent",
            "pml": "ob1",
            "btl": "tcp,self",
            "btl_tcp_if_include": "eth0",
            "oob_tcp_if_include": "eth0",
            "mpi_yield_when_idle": "1",  # all hosts share the cores
        }
        if variant in self.algorithms:
            options["coll_tuned_use_dynamic_rules"] = "1"
            options |= {f"coll_tuned_{name}": str(value) for name, value in self.algorithms[variant].items()}
        with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
            options["orte_tmpdir_base"] = folder
            counts = lab.rank_counts(workers, self.ranks)
            argv = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "-n", sum(counts.values())]
            argv += ["--host", ",".join(f"{host}:{count}" for host, count in counts.items())]
            argv += ["--output-filename", f"{folder}:nojobid"]
            argv += [word for name, value in options.items() for word in ("--mca", name, value)]
            argv += [built(*self.program), *command]
            done = lab.run(workers[0], argv, timeout_s=PATIENCE_S, apart=True)
            if done.status:
                raise LabError(f"mpirun: status {done.status}\n{done.output}{done.error}")
            files = sorted(pathlib.Path(folder).glob("rank.*/stdout"))
            return [file.read_text(encoding="utf-8") for file in files], done.error


SYSTEMS = {"gloo": Gloo, "openmpi": OpenMpi, "server": Server, "all-reduce": AllReduce, "tally": Tally}
DEFAULT = ["gloo", "openmpi", "server", "tally"]


def available(arguments, given, known=None):
    """{name: System} of those asked for that can run here; says what is left out and why.  known: as SYSTEMS."""
    found = {}
    for name, kind in (known or SYSTEMS).items():
        if name in arguments.systems:
            system = kind(arguments, given)
            reason = system.lacks()
            if not reason:
                found[name] = system
            elif name == "tally":
                raise LabError(reason)
            else:
                print(f"without {name}: {reason}", file=sys.stderr)
    return found


def agent(host, words):
    """What ssh does: a shell's command on a host, here of the cluster whose PID namespace this process is in."""
    pid = next((pid for pid, (_, name) in processes().items() if name == "lab:" + host), None)
    if pid is None:
        sys.exit(f"there is no host {host}")
    argv = enter(pid, ["sh", "-c", " ".join(words)])
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    agent(sys.argv[2], sys.argv[3:])
