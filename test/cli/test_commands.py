"""The commands of `tally` that start nothing: plan, params, secret, version, help."""

import json
import os
import re
import stat
import subprocess

import pytest
from programs import ROOT, TALLY, environment, tally

COMMANDS = ["run", "plan", "topo", "status", "trace", "params", "secret", "version", "help"]


def test_overview_names_every_command():
    done = tally("help")
    assert done.returncode == 0 and tally("--help").stdout == done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")] == COMMANDS
    nothing = tally()
    assert nothing.returncode == 2 and nothing.stderr == done.stdout and nothing.stdout == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command):
    done = tally("help", command)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: tally {command}")
    assert tally(command, "--help").stdout == done.stdout


@pytest.mark.parametrize("command, page", [("run", "tally-run.1"), ("plan", "tally.1"), ("topo", "tally.1"), ("status", "tally.1"), ("trace", "tally.1"), ("params", "tally.1")])
def test_manual_has_every_option(command, page):
    manual = (ROOT / "man" / page).read_text(encoding="utf-8").replace("\\-", "-")
    options = re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", tally(command, "--help").stdout)
    assert options and [option for option in options if option not in manual] == []


def test_manual_has_every_command():
    manual = (ROOT / "man" / "tally.1").read_text(encoding="utf-8")
    assert [c for c in COMMANDS if f".B {c}\n" not in manual] == []


def test_unknown_commands_are_refused():
    for arguments in (["no-such"], ["help", "no-such"]):
        done = tally(*arguments)
        assert done.returncode == 2 and 'no command "no-such"' in done.stderr


def test_version():
    text = (ROOT / "meson.build").read_text(encoding="utf-8")
    version = text.split("version: '")[1].split("'")[0]
    assert tally("version").stdout == tally("--version").stdout == f"tally {version}\n"


def test_a_full_disk_is_no_success():
    with open("/dev/full", "w", encoding="ascii") as full:
        done = subprocess.run([TALLY, "params"], stdout=full, stderr=subprocess.PIPE, env=environment())
    assert done.returncode == 1 and b"cannot write" in done.stderr


# --- plan --------------------------------------------------------------------------------------------


def plan(*arguments):
    done = tally("plan", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_plan_has_the_papers_figures():
    """All numbers of section 4.1 of BytePS (OSDI 2020); it cuts gamma_a = 1.469 to 1.46."""
    p = plan("-n", 32, "-k", 16, "-M", "1G", "-B", "100G")
    assert round(p["gamma_a"], 3) == 1.469 and round(p["gamma_p"], 2) == 1.52  # "by 46% and 52%"
    assert p["bytes"] == 2**30 and p["bandwidth_bits_per_s"] == 100e9
    assert p["all_reduce_time_s"] == pytest.approx(2 * 31 * 2**30 / (32 * 12.5e9))
    assert plan("-n", 8, "-k", 8)["gamma_a"] == pytest.approx(1.75)
    assert plan("-n", 512, "-k", 512)["gamma_a"] == pytest.approx(2, rel=1 / 256)  # towards 2


@pytest.mark.parametrize("n, k", [(2, 1), (3, 1), (3, 2), (8, 0), (8, 3), (8, 8), (32, 16), (32, 31)])
def test_plan_has_the_papers_equations(n, k):
    m, b, d = 1 << 30, 100e9 / 8, n * n + k * n - 2 * k
    p = plan("-n", n, "-k", k, "-M", m, "-B", "100G")
    cpu, worker = 2 * (n - 1) / d * m, (n - k) / d * m
    for s in p["services"]:
        due = cpu if s["kind"] == "cpu" else worker
        assert abs(s["bytes"] - due) < 1  # Eq. 1, 2
        moved = n * due if s["kind"] == "cpu" else m + (n - 2) * due  # Eq. 4 with its n, Eq. 3
        assert s["each_way_bytes"] == pytest.approx(moved)
    assert p["time_s"] == pytest.approx(2 * n * (n - 1) * m / (d * b))  # Eq. 6
    assert p["gamma_a"] == pytest.approx(d / n**2)  # Eq. 7
    if k:
        assert p["gamma_p"] == pytest.approx(d / (2 * k * (n - 1)))
        assert p["server_time_s"] == pytest.approx(max(m / b, n * m / (k * b)))
    if k == n:
        assert worker == 0 and p["gamma_p"] == pytest.approx(1)  # "falls back to non-colocated PS"
    if k == 0:
        assert p["time_s"] == pytest.approx(p["all_reduce_time_s"])


COLLECTIVES = ["all_gather_time_s", "reduce_scatter_time_s", "broadcast_time_s", "reduce_time_s", "all_to_all_time_s"]


def test_plan_of_other_collectives(listed):
    def seconds(*arguments):
        p = plan(*arguments)
        return [p[name] for name in COLLECTIVES]

    assert seconds("-n", 4, "-k", 4, "-M", 10**9, "-B", "8G") == pytest.approx([0.75, 0.75, 1, 1, 0.75])
    differ = listed("cpu 25G\nworker 8G x2\nworker 4G x2\n")  # the slow ones send and receive as much as the others
    assert seconds("-f", differ, "-M", 10**9) == pytest.approx([1.5, 1.5, 2, 2, 1.5])
    assert seconds("-n", 1, "-k", 1) == [0] * 5
    text = tally("plan", "-n", 4, "-M", "100M").stdout
    assert "\nall-gather                   62.91 ms\nreduce-scatter               62.91 ms\n" in text
    shared = listed("worker 8G card=a\nworker 8G card=a\nworker 8G\n")
    assert seconds("-f", shared) == [None] * 5
    assert "all-gather" not in tally("plan", "-f", shared).stdout


@pytest.mark.parametrize("n, k", [(1, 0), (1, 3), (2, 1), (3, 1), (8, 0), (8, 5), (8, 8), (8, 30)])
def test_plan_adds_up(n, k):
    p = plan("-n", n, "-k", k, "-M", 1000003)
    services = p["services"]
    assert [s["kind"] for s in services] == ["worker"] * n + ["cpu"] * k
    assert sum(s["bytes"] for s in services) == 1000003
    total = sum(s["weight"] for s in services)
    for s in services:
        assert abs(s["bytes"] - 1000003 * s["weight"] / total) < 1
    assert max(s["each_way_bytes"] for s in services) * 8 / p["bandwidth_bits_per_s"] == pytest.approx(
        p["time_s"], rel=1e-4
    )


def test_plan_says_what_one_more_brings():
    for n, k, more in [(8, 0, 8), (8, 7, 1), (8, 8, 0), (8, 9, 0), (2, 0, 0), (2, 1, 0), (1, 0, 0), (64, 3, 61)]:
        p = plan("-n", n, "-k", k)
        assert p["more_that_help"] == more and p["one_more_helps"] is (more > 0)
        assert (p["one_more_time_s"] < p["time_s"]) is (more > 0)
    assert plan("-n", 8)["gamma_p"] is None
    assert "between two worker machines" in tally("plan", "-n", 2).stdout
    assert "nothing crosses the network" in tally("plan", "-n", 1, "-k", 1).stdout
    assert "up to 4 more bring something" in tally("plan", "-n", 8, "-k", 4).stdout
    assert "one more CPU machine brings nothing" in tally("plan", "-n", 8, "-k", 8).stdout


@pytest.fixture
def listed(tmp_path):
    """Write a list of machines; returns its path."""

    def write(text):
        path = tmp_path / "machines"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_plan_of_listed_machines_alike_is_that_of_numbers(listed):
    a = plan("-f", listed("# ours\n\nworker 25G x4\ncpu 25G\ncpu 25000M # another\n"), "-M", "1G")
    b = plan("-n", 4, "-k", 2, "-B", "25G", "-M", "1G")
    assert a == b


def test_plan_of_machines_that_differ(listed):
    # Each takes (T b - M) / (n - 2) or T b / n of M = 1: 4 (10 T - 1) / 2 + 25 T / 4 = 1.
    p = plan("--machines", listed("cpu 25G\nworker 10G x4\n"), "-M", 10**9)
    t = 3 / 26.25 * 8
    assert p["time_s"] == pytest.approx(t, rel=1e-6) and p["bandwidth_bits_per_s"] is None
    assert [s["kind"] for s in p["services"]] == ["worker"] * 4 + ["cpu"]
    assert p["services"][4]["bytes"] == pytest.approx(25 * t / 8 / 4 * 1e9, rel=1e-6)
    for s in p["services"]:
        assert s["each_way_bytes"] * 8 / s["bandwidth_bits_per_s"] == pytest.approx(t, rel=1e-5)
    # A slow worker machine sums nothing, and is what all wait for: no other machine brings anything.
    path = listed("worker 10G x3\nworker 1G\ncpu 25G\n")
    p = plan("--machines", path, "-M", 10**9)
    assert p["services"][3]["bytes"] == 0 and p["busiest"] == 3 and not p["one_more_helps"]
    assert p["time_s"] == pytest.approx(8)
    assert "busiest: worker machine, 1 Gbit/s\n" in tally("plan", "--machines", path).stdout


def test_plan_of_services_that_are_slow_and_cards_that_are_shared(listed):
    p = plan("-f", listed("worker 10G x8\ncpu 10G x7\ncpu 10G sum=5G\n"))
    first, last = p["services"][8], p["services"][15]
    assert last["bytes"] * 2 == pytest.approx(first["bytes"], rel=1e-4) and last["sum_rate_bits_per_s"] == 5e9
    # A CPU machine behind a worker machine's card brings nothing; the two sum what the one would.
    p = plan("-f", listed("worker 10G x3\ncpu 10G card=a\nworker 10G card=a\n"), "-M", 10**6)
    assert [s["card"] for s in p["services"]] == [0, 1, 2, 3, 3]
    assert p["services"][3]["bytes"] + p["services"][4]["bytes"] == pytest.approx(250000, abs=2)
    assert p["gamma_a"] == pytest.approx(1)
    assert "nothing crosses it" in tally("plan", "-f", listed("worker 1G x3 card=a\n")).stdout


MACHINES = ROOT / "test" / "topo" / "machines"


def inside(name, *arguments):
    return plan("--topo", MACHINES / f"{name}.xml", "--links", MACHINES / f"{name}.links", "-M", 10**9, *arguments)


def test_plan_with_the_inside_of_machines():
    """Section 4.1 and 4.2 of BytePS together: the shape of its figures 13 and 14."""
    time = {name: [inside(name, "-n", 8, "-k", k)["end_to_end_time_s"] for k in range(9)] for name in ("pcie", "nvlink")}
    reduce = {name: inside(name, "-n", 8)["end_to_end_all_reduce_time_s"] for name in time}
    for name, times in time.items():
        assert times == sorted(times, reverse=True) and times[0] < reduce[name]
        assert times[0] == pytest.approx(1.75 * 8 / 100)  # k = 0: the card, at its full rate, in both
    gain = {name: times[0] / times[8] for name, times in time.items()}
    assert gain["nvlink"] == pytest.approx(1.75) and 1 < gain["pcie"] < gain["nvlink"]
    assert time["pcie"][8] == pytest.approx(1.75 * 8 / 105)  # the links of the GPUs
    p = inside("pcie", "-n", 8, "-k", 8)
    assert p["bandwidth_bits_per_s"] == 100e9 and p["time_s"] == pytest.approx(0.08)  # what the file says of the card
    assert p["inside"]["bottleneck"].startswith("PCIe") and p["inside"]["gpus"] == 8
    slow = inside("pcie", "-n", 8, "-B", "10G")  # a slow network hides the inside
    assert slow["end_to_end_time_s"] == pytest.approx(slow["time_s"]) and "network" in slow["inside"]["bottleneck"]
    text = tally("plan", "-n", 8, "-k", 8, "--gpus", 8, "-B", "100G").stdout
    assert "with the inside of worker machines, 8 GPUs each" in text and "assumed: four GPUs" in text
    assert "more CPU machines bring nothing" in text


def test_plan_with_fewer_gpus_and_with_listed_machines(listed):
    assert inside("pcie", "-n", 8, "-g", 4)["inside"]["gpus"] == 4
    p = inside("nvlink", "-f", listed("worker 100G x4\nworker 25G\n"))
    slow = inside("nvlink", "-n", 5, "-B", "25G")
    assert p["end_to_end_time_s"] == pytest.approx(p["time_s"]) and p["time_s"] < slow["time_s"]
    alone = plan("-n", 1, "--gpus", 8, "-M", 10**9)
    assert alone["time_s"] == 0 and alone["end_to_end_time_s"] > 0
    for count in (1, 2, 5, 64):
        assert plan("-n", 2, "--gpus", count)["inside"]["gpus"] == count


def test_plan_prints_units():
    text = tally("plan", "-n", 8, "-k", 2).stdout
    assert text.startswith("gradients: 100 MB\n\n")
    assert re.search(r"^8 worker machines, 10 Gbit/s +7\.895 MB +7\.89% +147\.4 MB$", text, re.MULTILINE), text
    assert re.search(r"^2 CPU machines, 10 Gbit/s +18\.42 MB +18\.42% +147\.4 MB$", text, re.MULTILINE), text
    assert re.search(r"^Tally +123\.62 ms$", text, re.MULTILINE), text


def test_plan_writes_sizes_as_settings_do():
    sizes = {plan("-n", 4, "-M", size)["bytes"] for size in ("100M", "100MB", "100mib", 100 << 20, "102400.0K")}
    assert sizes == {100 << 20}


def test_plan_knows_where_its_own_limit_is():
    """More machines than Tally handles might bring something; that is not said of them."""
    full = plan("-n", 600, "-k", 424)
    assert full["one_more_helps"] is None and full["more_that_help"] == 0
    text = tally("plan", "-n", 600, "-k", 424).stdout
    assert "no more than these 1024 machines" in text and "brings nothing" not in text
    assert plan("-n", 600, "-k", 423)["one_more_helps"]


@pytest.mark.parametrize(
    "arguments, piece",
    [
        ([], "-n, the number"),
        (["-n", "0"], "-n 0"),
        (["-k", "2"], "-n, the number of worker machines, is needed"),
        (["-n", "1000", "-k", "1000"], "at most 1024 machines"),
        (["-n", "8", "--gpus", "0"], "--gpus 0"),
        (["-n", "8", "--gpus", "65"], "1 to 64"),
        (["-n", "8", "--links", "x"], "--links goes with --topo"),
        (["-n", "8", "--gpus", "8", "-M", "2T"], "at most 1T"),
        (["-n", "8", "-B", "0"], "-B 0"),
        (["-n", "8", "-B", "fast"], "-B fast"),
        (["-n", "8", "-B", "inf"], "-B inf"),
        (["-n", "8", "-B", "1e-300"], "-B 1e-300"),
        (["-n", "8", "-B", "0x10"], "-B 0x10"),
        (["-n", "8", "-B", "1e9"], "-B 1e9"),
        (["-n", "8", "-B", " 1G"], "-B  1G"),
        (["-n", "8", "-B", "999"], "from 1k on"),
        (["-n", "8", "-M", "-5"], "-M -5"),
        (["-n", "8", "-M", "1X"], "-M 1X"),
        (["-n", "8", "-M", "0x10"], "-M 0x10"),
        (["-n", "8", "-M", "0x1p3G"], "-M 0x1p3G"),
        (["-n", "8", "-M", "1e2K"], "-M 1e2K"),
        (["-n", "8", "-M", "9" * 400], "-M 999"),
        (["-n", "8", "more"], "unexpected argument more"),
        (["-n", "8", "--machines", "x"], "-n and --machines exclude each other"),
    ],
)
def test_plan_refuses(arguments, piece):
    done = tally("plan", *arguments)
    assert done.returncode == 2 and piece in done.stderr and done.stdout == ""


@pytest.mark.parametrize(
    "text, piece",
    [
        ("worker 10G\nworker 0\n", 'line 2: "0" is no rate'),
        ("worker 10G\n\nwroker 10G\n", 'line 3: "wroker" is neither worker nor cpu'),
        ("worker\n", "line 1: a rate in bit/s is missing"),
        ("worker 10G x0\n", 'line 1: "x0" is no number of machines'),
        ("worker 10G sum=lots\n", 'line 1: "sum=lots" has no rate'),
        ("worker 10G card=\n", 'line 1: "card=" has no name'),
        ("worker 10G 20G\n", 'line 1: "20G" is none of'),
        ("worker 10G x2 x3\n", 'line 1: "x3" says again'),
        ("worker 10G card=a card=b\n", 'line 1: "card=b" says again'),
        ("worker 10G sum=5G sum=6G\n", 'line 1: "sum=6G" says again'),
        ("worker 10G x1000\ncpu 10G x25\n", "line 2: at most 1024 machines"),
        ("worker 10G card=\x1b[31mred\n", 'line 1: "card=?[31mred" holds control characters'),
        ("wor\x9bker 10G\n", 'line 1: "wor??ker" holds control characters'),
        ("cpu 10G\n", "names no worker machine"),
        ("", "names no worker machine"),
    ],
)
def test_plan_names_the_line(listed, text, piece):
    done = tally("plan", "--machines", listed(text))
    assert done.returncode == 2 and piece in done.stderr and done.stdout == ""


def test_plan_of_one_worker_machine(listed):
    assert "nothing crosses the network" in tally("plan", "-f", listed("worker 10G\ncpu 10G\n")).stdout
    slow = tally("plan", "-f", listed("worker 10G sum=5G\ncpu 10G\n")).stdout  # the other adds too
    assert "nothing crosses" not in slow and "Tally " in slow


def test_status_without_its_host():
    done = tally("status", "")
    assert done.returncode == 2 and "HOST is empty" in done.stderr


def test_plan_without_its_file():
    done = tally("plan", "--machines", "/nonexistent/machines")
    assert done.returncode == 1 and "cannot open /nonexistent/machines" in done.stderr


# --- params ------------------------------------------------------------------------------------------


def test_params_show_what_is_in_force(tmp_path):
    config = tmp_path / "tally.conf"
    config.write_text("TALLY_PORT=1234\n", encoding="utf-8")
    env = {"TALLY_CONFIG": str(config), "TALLY_PART_BYTES": "2M", "TALLY_SECRET": "do not show this at all"}
    done = tally("params", "--json", env=env)
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["TALLY_PORT"]["value"] == 1234 and rows["TALLY_PORT"]["default"] == 29777
    assert rows["TALLY_PART_BYTES"]["value"] == 2 << 20 and rows["TALLY_PART_BYTES"]["agreed"] is True
    assert rows["TALLY_SECRET"]["value"] == "(set)"
    assert rows["TALLY_LOG"]["choices"] == ["off", "error", "warning", "info", "debug"]
    assert rows["TALLY_COORD"]["value"] is None
    table = tally("params", env=env).stdout
    assert "do not show" not in done.stdout + table
    assert [line.split()[0] for line in table.splitlines()[1:]] == list(rows)


def test_nothing_prints_control_characters(tmp_path):
    file = tmp_path / "\x1b[31mfile"
    file.write_text("TALLY_JOB=a\x1b[31mb\n", encoding="utf-8")
    done = tally("params", env={"TALLY_CONFIG": str(file)})
    assert done.returncode == 0 and "a?[31mb" in done.stdout and "\x1b" not in done.stdout
    for command in (["plan", "--machines", file], ["topo", "--xml", file], ["topo", "--links", file],
                    ["trace", "summary", file], ["secret", file], ["run", "-n", "\x1b"], ["plan", "\x1b"]):
        done = tally(*command)
        assert done.returncode and "tally " + command[0] in done.stderr and "\x1b" not in done.stdout + done.stderr


def test_params_refuse_what_every_process_would():
    done = tally("params", env={"TALLY_PORT": "0"})
    assert done.returncode == 1 and done.stderr == "tally params: TALLY_PORT=0 is out of range: 1 to 65535\n"


def test_params_make_the_manual_page_whatever_is_set():
    assert tally("params", "--man").stdout == tally("params", "--man", env={"TALLY_PORT": "x"}).stdout != ""


# --- secret ------------------------------------------------------------------------------------------


def test_secret_is_random_and_long():
    first, second = tally("secret").stdout, tally("secret").stdout
    assert first != second and len(bytes.fromhex(first.strip())) == 32


def test_secret_goes_into_a_file_of_its_own(tmp_path):
    file = tmp_path / "a" / "b" / "secret"
    old = os.umask(0)
    try:
        done = tally("secret", file)
    finally:
        os.umask(old)
    assert done.returncode == 0 and done.stdout == ""
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    text = file.read_text(encoding="ascii")
    assert len(bytes.fromhex(text.strip())) == 32 and text.endswith("\n")
    again = tally("secret", file)
    assert again.returncode == 1 and "File exists" in again.stderr
    assert file.read_text(encoding="ascii") == text
