"""Ranks started by hand with torchrun's variables, each in a network namespace of its own, and tallyd in two more:
what a job over real machines sees of addresses, secrets and machines, on one."""

import os
import pathlib
import shutil
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("TALLY_TEST_BUILD", ROOT / "build"))
RANKS, SERVICES = 4, 2
PATIENCE_S = 120


def find(*places):
    """The program at the first of these places of the build that has it."""
    return next(str(BUILD / p) for p in places if (BUILD / p).exists())


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Network:
    """Namespaces on one bridge, which has a namespace of its own; host i has the address 10.77.0.(i + 1)."""

    def __init__(self, hosts):
        self.prefix = f"tally{os.getpid()}"
        self.names = []
        try:
            bridge = self.add("b")
            ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
            ip("-n", bridge, "link", "set", "bridge", "up")
            self.hosts = [self.add(str(i)) for i in range(hosts)]
            for i, host in enumerate(self.hosts):
                ip("-n", bridge, "link", "add", f"port{i}", "type", "veth", "peer", "name", "net0", "netns", host)
                ip("-n", bridge, "link", "set", f"port{i}", "master", "bridge", "up")
                ip("-n", host, "address", "add", f"10.77.0.{i + 1}/24", "dev", "net0")
                ip("-n", host, "link", "set", "net0", "up")
                ip("-n", host, "link", "set", "lo", "up")
        except BaseException:
            self.remove()
            raise

    def add(self, name):
        name = f"{self.prefix}{name}"
        ip("netns", "add", name)
        self.names.append(name)
        return name

    def remove(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.fixture(scope="module")
def network():
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("making network namespaces needs root and iproute2")
    try:
        made = Network(RANKS + SERVICES)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    yield made
    made.remove()


def run(network, tmp_path, secret_of=lambda host: "a secret of sixteen bytes and more", extra=None):
    """(exit status, output) of each rank, then of each tallyd."""
    processes = []
    for host in range(RANKS + SERVICES):
        env = {k: v for k, v in os.environ.items() if not k.startswith("TALLY_")}
        env.update(XDG_CONFIG_HOME=str(tmp_path / "none"), TALLY_SERVERS=str(SERVICES), **(extra or {}))
        if secret := secret_of(host):
            path = tmp_path / f"secret{host}"
            path.write_text(secret + "\n")
            path.chmod(0o600)
            env["TALLY_SECRET_FILE"] = str(path)
        if host < RANKS:
            env.update(
                RANK=str(host),
                WORLD_SIZE=str(RANKS),
                LOCAL_RANK="0",
                LOCAL_WORLD_SIZE="1",
                MASTER_ADDR="10.77.0.1",
                MASTER_PORT="29500",
            )
            command = [find("meson/examples/push_pull", "examples/push_pull")]
        else:
            command = [find("bin/tallyd", "src/tallyd/tallyd"), "--coord", "10.77.0.1", "--once"]
        output = open(tmp_path / f"output{host}", "w+", encoding="utf-8")
        processes.append(
            (
                subprocess.Popen(
                    ["ip", "netns", "exec", network.hosts[host], *command],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                ),
                output,
            )
        )
    end = time.monotonic() + PATIENCE_S
    results = []
    for process, output in processes:
        try:
            status = process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait() and "hangs"
        output.seek(0)
        results.append((status, output.read()))
        output.close()
    return results


def test_ranks_by_hand(network, tmp_path):
    results = run(network, tmp_path)
    assert [status for status, _ in results] == [0] * (RANKS + SERVICES), results
    assert "4 ranks on 4 machines, 6 services: each of 1000000 sums is 10, 0 are wrong" in results[0][1]
    assert "coordinator 10.77.0.1:29777" in results[0][1]
    for _, said in results[RANKS:]:
        assert "4 ranks on 4 machines, 2 tallyd" in said


def test_no_secret(network, tmp_path):
    # Rank 0 cannot know whether the others are on its machine.
    results = run(network, tmp_path, secret_of=lambda host: None, extra={"TALLY_JOIN_TIMEOUT": "4"})
    for status, said in results:
        assert status == 1, results
        assert "needs a secret" in said


def test_one_has_another_secret(network, tmp_path):
    results = run(
        network,
        tmp_path,
        secret_of=lambda host: "another secret of this job" if host == 2 else "a secret of sixteen bytes and more",
        extra={"TALLY_JOIN_TIMEOUT": "4"},
    )
    assert results[2][0] == 1 and "the job secret differs" in results[2][1]
    for rank in (0, 1, 3):
        assert results[rank][0] == 1, results
        assert "rank 2 did not join" in results[rank][1]
