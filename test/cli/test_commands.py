"""The commands of `tally` that start nothing: plan, params, secret, version, help."""

import json
import os
import re
import stat
import subprocess

import pytest
from programs import ROOT, TALLY, environment, tally

COMMANDS = ["run", "plan", "params", "secret", "version", "help"]


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


@pytest.mark.parametrize("command, page", [("run", "tally-run.1"), ("plan", "tally.1"), ("params", "tally.1")])
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
    p = plan("-n", 32, "-k", 16, "-M", "1G", "-B", "100G")
    assert round(p["gamma_a"], 3) == 1.469 and round(p["gamma_p"], 3) == 1.516
    assert p["bytes"] == 2**30 and p["bandwidth_bits_per_s"] == 100e9
    assert p["all_reduce_time_s"] == pytest.approx(2 * 31 * 2**30 / (32 * 12.5e9))
    assert plan("-n", 8, "-k", 8)["gamma_a"] == pytest.approx(1.75)


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
    for n, k, helps in [(8, 0, True), (8, 7, True), (8, 8, False), (8, 9, False), (2, 0, False), (1, 0, False)]:
        p = plan("-n", n, "-k", k)
        assert p["one_more_helps"] is helps
        assert (p["one_more_time_s"] < p["time_s"]) is helps
    assert plan("-n", 8)["gamma_p"] is None
    assert "between two worker machines" in tally("plan", "-n", 2).stdout
    assert "nothing crosses the network" in tally("plan", "-n", 1, "-k", 1).stdout
    assert "one more CPU machine: " in tally("plan", "-n", 8, "-k", 4).stdout


@pytest.mark.parametrize(
    "arguments, piece",
    [
        ([], "-n, the number"),
        (["-n", "0"], "-n 0"),
        (["-n", "1000", "-k", "1000"], "at most 1024 machines"),
        (["-n", "8", "-B", "0"], "-B 0"),
        (["-n", "8", "-B", "fast"], "-B fast"),
        (["-n", "8", "-B", "inf"], "-B inf"),
        (["-n", "8", "-M", "-5"], "-M -5"),
        (["-n", "8", "-M", "1X"], "-M 1X"),
        (["-n", "8", "more"], "unexpected argument more"),
    ],
)
def test_plan_refuses(arguments, piece):
    done = tally("plan", *arguments)
    assert done.returncode == 2 and piece in done.stderr and done.stdout == ""


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
