"""A whole job's timeline, merged and summed up; and what `tally trace` refuses."""

import collections
import json
import os
import re
import stat
import sys

import pytest
from programs import BUILD, ROOT, tally

PROGRAM = BUILD / "meson" / "test" / "jobs" / "every_operation"
RANKS, TALLYD = 2, 1

# Rank 0 has the tallyd leave whose number is in the first file; all sum until the second one says that it has left.
ONE_LEAVES = """
import array, os, pathlib, signal, sys
import tally
pid, left = map(pathlib.Path, sys.argv[1:])
tally.init()
tally.push_pull(array.array("f", [1.0] * 1000), name="x")
if tally.rank() == 0:
    os.kill(int(pid.read_text()), signal.SIGTERM)
while tally.push_pull(array.array("f", [float(left.exists())]), name="left")[0] == 0:
    pass
tally.shutdown()
"""


def run(folder, *how, **env):
    how = how or ("-n", RANKS, "-k", TALLYD)
    done = tally("run", *how, "--", PROGRAM, env={"TALLY_TRACE": str(folder / "t"), **env})
    assert done.returncode == 0, done.stderr
    return done, sorted(map(str, folder.glob("t.*.json")))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return run(tmp_path_factory.mktemp("trace"))[1]


def with_clocks(folder, files, clock):
    """Copies of the files that say they have the clock that clock(machine) names."""
    folder.mkdir(exist_ok=True)
    copies = [folder / os.path.basename(file) for file in files]
    for file, copy in zip(files, copies):
        with open(file, encoding="utf-8") as text:
            whole = text.read()
        machine = re.search('"machine":"([^"]*)"', whole)[1]
        copy.write_text(re.sub('"clock":"[^"]*"', f'"clock":"{clock(machine)}"', whole, count=1), encoding="utf-8")
    return copies


@pytest.fixture(scope="module", params=["one clock", "many clocks"])
def merged(request, files, tmp_path_factory):
    """By the clock that all have; and as if each machine had one of its own, by the messages."""
    folder = tmp_path_factory.mktemp("merged")
    out = folder / "all.json"
    if request.param == "many clocks":
        files = with_clocks(folder, files, lambda machine: machine)
    done = tally("trace", "merge", "-o", out, *files)
    assert done.returncode == 0, done.stderr
    events = json.loads(out.read_text(encoding="utf-8"))["traceEvents"]
    return done.stdout, events


class Slices:
    """{(process, row): {(tensor, round, part, peer): event}}; process: ("rank", 0) or ("service", 0)."""

    def __init__(self, events):
        self.process = {
            e["pid"]: ("service" if e["args"]["service"] else "rank", e["args"]["index"])
            for e in events
            if e["name"] == "tally_process"
        }
        self.rows = collections.defaultdict(dict)
        for e in events:
            if e["ph"] in "Xb":
                a = e["args"]
                row = self.rows[self.process[e["pid"]], e["cat"]]
                row[a["key"], a["round"], a.get("part"), a.get("peer")] = e


def end(event):
    return event["ts"] + event["dur"]


def test_each_process_has_a_file_of_its_own(files):
    assert [re.sub("-[0-9a-f]{8}[.]", "-L.", f.split(".", 2)[2]) for f in files] == [
        *(f"rank-{i}.json" for i in range(RANKS)),
        *(f"service-{i}-L.json" for i in range(RANKS + TALLYD)),
    ]
    assert len({f.split(".")[1] for f in files}) == 1
    for file in files:
        with open(file, encoding="utf-8") as text:
            assert len(json.load(text)["traceEvents"]) > 100


def test_merging_says_how_sure_it_is(merged, request):
    lines = merged[0].splitlines()
    assert len(lines) == 1 + RANKS + RANKS + TALLYD
    assert [line.split()[:2] for line in lines[1:]] == [
        *(["rank", str(i)] for i in range(RANKS)),
        *(["service", str(i)] for i in range(RANKS + TALLYD)),
    ]
    for line in lines[1:]:
        ahead, error, slices, lost = line.split()[-4:]
        assert abs(float(ahead)) <= float(error) + 0.001 and int(slices) > 100 and lost == "0"
    # Whoever has rank 0's clock, as here all have in truth, is known exactly.
    exact = sum(line.split()[-3] == "0.000" for line in lines[1:])
    assert exact == (2 if "many" in request.node.name else len(lines) - 1)


def test_stages_are_in_causal_order(merged):
    rows = Slices(merged[1]).rows
    pushes = refused = 0
    for r in range(RANKS):
        me = ("rank", r)
        operations = {key[:2]: e for key, e in rows[me, "operation"].items()}
        for key, queued in rows[me, "queue"].items():
            tensor, number, part, s = key
            there = (tensor, number, part, r)
            alone = (tensor, number, part, None)
            pushes += 1
            if rows[me, "wait"].get(key, {"args": {"open": 0}})["args"]["open"]:
                refused += 1  # the job has one operation on which the ranks disagree
                continue
            line, send, result = (rows[me, row][key] for row in ("admitted", "send", "result"))
            push, answer = (rows[("service", s), row][there] for row in ("push", "answer"))
            gather, summed = (rows[("service", s), row][alone] for row in ("gather", "sum"))
            operation = operations[tensor, number]
            slack = 0.0021  # times are rounded to nanoseconds, and then there are floats
            chain = [
                operation["ts"], queued["ts"], line["ts"], send["ts"], push["ts"], end(push), end(gather), end(summed)
            ]
            assert all(a <= b + slack for a, b in zip(chain, chain[1:])), (key, chain)
            chain = [gather["ts"], answer["ts"], result["ts"], end(result), end(operation)]
            assert all(a <= b + slack for a, b in zip(chain, chain[1:])), (key, chain)
            assert gather["ts"] <= push["ts"] + slack and send["ts"] + slack <= end(result)
            if key in rows[me, "wait"]:
                wait = rows[me, "wait"][key]
                assert abs(wait["ts"] - end(send)) < slack and abs(end(wait) - result["ts"]) < slack
        assert len(operations) >= 100
    assert pushes == sum(len(rows[("service", s), "push"]) for s in range(RANKS + TALLYD))
    assert pushes >= 1000 and refused == RANKS


def test_slices_of_a_row_do_not_cross(merged):
    lanes = collections.defaultdict(list)
    for e in merged[1]:
        if e["ph"] == "X":
            lanes[e["pid"], e["tid"]].append((e["ts"], end(e)))
    assert len(lanes) > 20
    for lane in lanes.values():
        lane.sort()
        assert all(a[1] <= b[0] + 0.0011 for a, b in zip(lane, lane[1:]))


def test_what_a_viewer_needs(merged):
    events = merged[1]
    titles = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"send to service 2", "result of service 0", "push of rank 1", "sum", "answer to rank 0"} <= titles
    names = {e["name"] for e in events if e["ph"] == "X"}
    assert any(name.startswith("layer 47/weight[") for name in names)
    # Services know no names of their own; the ranks' files have them.
    of_tallyd = {e["name"] for e in events if e["ph"] == "X" and e["pid"] > 1000000}
    assert any(name.startswith("layer ") for name in of_tallyd)
    begun = collections.Counter((e["pid"], e["id2"]["local"]) for e in events if e["ph"] == "b")
    assert begun == collections.Counter((e["pid"], e["id2"]["local"]) for e in events if e["ph"] == "e")
    flight = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    assert max(flight) > 0 and flight[-1] == 0
    assert min(e["ts"] for e in events if "ts" in e) == 0


def documented_rows():
    """{name: row as a viewer shows it} of the two tables of docs/trace.md."""
    text = (ROOT / "docs" / "trace.md").read_text(encoding="utf-8").split("## Rows")[1].split("\n## ")[0]
    rows = re.findall(r"(?m)^\| `([^`]*)` \|", text)
    return {row.split()[0]: row for row in rows}


def test_rows_have_one_name(merged, files):
    """In the documents, in the file and in the summary; what has no part or peer has no number in its place."""
    documented = documented_rows()
    assert documented.pop("change") == "change"  # this job has none: the next test's has one
    slices = [e for e in merged[1] if e["ph"] in "Xb"]
    assert {e["cat"] for e in slices} | {"bytes"} == set(documented)
    shown = {e["name"] for e in slices if e["ph"] == "b"}
    shown |= {e["args"]["name"] for e in merged[1] if e["name"] == "thread_name"}
    shown |= {e["name"] for e in merged[1] if e["ph"] == "C"}
    assert {re.sub(r"(service|rank) \d+$", lambda m: m[1] + " " + m[1][0].upper(), row) for row in shown} == set(
        documented.values())
    done = tally("trace", "summary", *files)
    stages = {line.split()[0] for line in done.stdout.split("machine ")[0].splitlines() if line.startswith("  ")}
    assert stages - {"count"} == set(documented) - {"bytes"}


def test_a_change_of_the_split_is_a_slice_at_each_rank(tmp_path):
    pid, left, daemon = tmp_path / "pid", tmp_path / "left", tmp_path / "tallyd"
    daemon.write_text(f'#!/bin/sh\n{BUILD}/bin/tallyd "$@" & echo $! > {pid}\nwait $! && touch {left}\n', encoding="utf-8")
    daemon.chmod(0o755)
    job = (sys.executable, "-c", ONE_LEAVES, pid, left)
    done = tally("run", "-n", RANKS, "-k", 1, "--tallyd", daemon, "--", *job, env={"TALLY_TRACE": str(tmp_path / "t")})
    assert done.returncode == 0, done.stderr
    files = sorted(map(str, tmp_path.glob("t.*.rank-*.json")))
    for file in files:
        with open(file, encoding="utf-8") as text:
            events = json.load(text)["traceEvents"]
        changes = [e for e in events if e["ph"] in "Xb" and e["cat"] == "change"]
        # It gives up its share; that it has gone may be a second one, which need not have ended.
        assert [(e["name"], e["args"].get("part")) for e in changes] in ([("change", None)], [("change", None)] * 2)
        assert not changes[0]["args"]["open"] and changes[0]["args"]["round"] > 1
        summary = tally("trace", "summary", file).stdout
        assert re.search(r"(?m)^  change +[12] ", summary), summary
    for file in files:
        with open(file, encoding="utf-8") as text:
            assert "4294967295" not in text.read()


def test_summary(files):
    done = tally("trace", "summary", *files)
    assert done.returncode == 0, done.stderr
    for word in ("operation", "queue", "send", "gather", "sum", "answer", "sends not"):
        assert word in done.stdout
    machines = done.stdout.split("machine ")[1].splitlines()[1:]
    assert len(machines) == RANKS + TALLYD
    for line in machines:
        assert all(0 < float(share.rstrip("%")) < 100 for share in line.split()[-3:-1])


def read(file):
    with open(file, encoding="utf-8") as text:
        events = json.load(text)["traceEvents"]
    return events[0]["args"], [e for e in events if e["ph"] in "Xb"]


def idle_shares(files):
    """{lowest rank: (sends not, receives not)} of each machine, in percent."""
    processes = [read(file) for file in files]
    machine = {(head["service"], head["index"]): head["machine"] for head, _ in processes}
    shares = {}
    for home in set(machine.values()):
        mine = [(head, e) for head, events in processes if head["machine"] == home for e in events]
        wall = max(end(e) for _, e in mine) - min(e["ts"] for _, e in mine)
        busy = []
        for rows in (("send", "answer"), ("result", "push")):
            busy.append(0)
            last = 0
            for e in sorted((e for head, e in mine if e["cat"] in rows
                             and machine[1 - head["service"], e["args"]["peer"]] != home), key=lambda e: e["ts"]):
                busy[-1] += max(0, end(e) - max(last, e["ts"]))
                last = max(last, end(e))
        lowest = min(index for (service, index), at in machine.items() if at == home and not service)
        shares[lowest] = tuple(100 * (1 - b / wall) for b in busy)
    return shares


def machine_rows(files):
    done = tally("trace", "summary", *files)
    assert done.returncode == 0, done.stderr
    return [line.rsplit(maxsplit=3) for line in done.stdout.split("machine ")[1].splitlines()[1:]]


@pytest.mark.parametrize("teams", ["on", "off"])
def test_summary_of_machines_with_several_ranks(tmp_path, teams):
    """What the ranks of a machine exchange with its service does not pass its card, and they have one."""
    _, files = run(tmp_path, "-n", 4, "--machines", 2, TALLY_LOCAL=teams)
    assert len(files) == 4 + 2
    rows = machine_rows(files)
    assert [row[0].split()[:2] + row[0].split()[-3:] for row in rows] == [
        ["rank", "0", "and", "2", "more"], ["rank", "2", "and", "2", "more"]
    ]
    shares = idle_shares(files)
    for row in rows:
        of_machine = shares[int(row[0].split()[1])]
        assert all(abs(float(text.rstrip("%")) - value) < 0.11 for text, value in zip(row[1:3], of_machine))


def test_summary_where_two_have_had_a_place(tmp_path, files):
    """A tallyd that was on rank 0's machine before another came into its place, on another machine."""
    with open(next(file for file in files if f"service-{RANKS}-" in file), encoding="utf-8") as text:
        lines = text.read().splitlines()
    last = lines[-2].split('"args"')[0] + '"args":{"slices":0,"samples":0}}'
    head = re.sub('"machine":"[^"]*"', '"machine":"%s"' % read(files[0])[0]["machine"], lines[1])
    before = tmp_path / "before"
    for to, same in ((2, True), (2 * 10**18, False)):
        life = '"incarnation":"%016x","from_ns":1,"to_ns":%d' % (5, to)
        changed = re.sub('"incarnation":"[0-9a-f]*","from_ns":[0-9]*,"to_ns":[0-9]*', life, head)
        before.write_text("\n".join([lines[0], changed, last, "]}"]) + "\n", encoding="utf-8")
        rows, more = machine_rows(files), machine_rows([*files, before])
        assert len(rows) == len(more) and rows[1:] == more[1:]
        assert (rows[0][1:] == more[0][1:]) == same


def test_ranks_that_share_memory(tmp_path):
    """No messages: their operations are seen, on the clock that they share."""
    _, files = run(tmp_path, "-n", RANKS)
    out = tmp_path / "all"
    merging = tally("trace", "merge", "-o", out, *files)
    assert merging.returncode == 0, merging.stderr
    events = json.loads(out.read_text(encoding="utf-8"))["traceEvents"]
    rows = Slices(events).rows
    operations = [rows[("rank", r), "operation"] for r in range(RANKS)]
    assert operations[0].keys() == operations[1].keys()
    layers = [key for key, e in operations[0].items() if e["args"]["tensor"].startswith("layer ")]
    assert len(layers) >= 100 and not any(key in rows[("rank", 0), "send"] for key in layers)
    for key in layers:
        mine = [operation[key] for operation in operations]
        assert max(e["ts"] for e in mine) <= min(end(e) for e in mine) + 0.0021
        assert not any(e["args"]["open"] for e in mine)
    # One goes to the service after all, for the ranks disagree: it is seen once.
    assert len([e for e in events if e.get("cat") == "operation" and e["ph"] == "b"]) == sum(map(len, operations))
    assert not any(e["args"]["open"] for operation in operations for e in operation.values())
    assert [row[1:3] for row in machine_rows(files)] == [["100.0%", "100.0%"]]


def test_a_small_ring_keeps_the_end(tmp_path):
    done, small = run(tmp_path, TALLY_TRACE_BYTES="64K")
    assert "older ones are lost (TALLY_TRACE_BYTES)" in done.stderr
    merged = tally("trace", "merge", "-o", tmp_path / "all", *small)
    assert merged.returncode == 0, merged.stderr
    assert all(int(line.split()[-1]) > 0 for line in merged.stdout.splitlines()[1:])


def test_a_folder(tmp_path):
    tally("run", "-n", RANKS, "--", PROGRAM, env={"TALLY_TRACE": f"{tmp_path}/"})
    assert len(list(tmp_path.glob("tally.*.rank-*.json"))) == RANKS


def test_a_job_goes_on_without_its_file(tmp_path):
    done, none = run(tmp_path / "missing")
    assert none == []
    assert f"cannot write {tmp_path}/missing/t." in done.stderr and "No such file" in done.stderr


def test_runs_do_not_overwrite_one_another(tmp_path, files):
    run(tmp_path)
    _, both = run(tmp_path)
    assert len(both) == 2 * len(files)
    for what in ("merge", "summary"):
        done = tally("trace", what, *both)
        assert done.returncode == 1 and done.stdout == ""
        assert any(f"{file} is of another job" in done.stderr for file in both)
    done = tally("trace", "summary", files[0], files[0])
    assert done.returncode == 1 and "and so has another file" in done.stderr


def test_who_has_exchanged_nothing_is_left_out(tmp_path):
    """A tallyd without a share, whose clock nobody knows."""
    done, files = run(tmp_path, TALLY_SPLIT="all-reduce")
    merged = tally("trace", "merge", "-o", tmp_path / "all", *files)
    assert merged.returncode == 0, merged.stderr
    assert merged.stderr.count("is left out") == TALLYD and "service-%d" % RANKS in merged.stderr
    assert json.loads((tmp_path / "all").read_text())


def test_who_was_killed_is_left_out(tmp_path, files):
    """Its file has been empty since it was made; what the others have written says what it kept waiting."""
    empty = tmp_path / "empty"
    empty.write_text("", encoding="utf-8")
    others = [file for file in files if "service-%d" % RANKS not in file]
    for command in (["merge", "-o", tmp_path / "all"], ["summary"]):
        done = tally("trace", *command, *others[:1], empty, *others[1:])
        assert done.returncode == 0 and "rank 1" in done.stdout
        assert done.stderr == (
            f"tally trace: {empty} is left out: it is empty: its process ended before it wrote, or its disk was full\n"
        )


def test_what_is_cut_off_is_left_out(tmp_path, files):
    """Of a file with several processes, too."""
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    others = [file for file in files if "service-%d" % RANKS not in file]
    for file in files[0], whole:
        if file == whole:
            assert tally("trace", "merge", "-o", whole, *others[2:]).returncode == 0
        with open(file, encoding="utf-8") as text:
            cut.write_text(text.read()[:-100], encoding="utf-8")
        rest = others[1:] if file == files[0] else others[:2]
        for command in (["merge", "-o", tmp_path / "all"], ["summary"]):
            done = tally("trace", *command, cut, *rest)
            assert done.returncode == 0 and "rank 1" in done.stdout
            assert f"tally trace: {cut} is left out: it is cut off" in done.stderr
            assert done.stdout == tally("trace", *command, *rest).stdout


def test_a_host_of_control_characters(tmp_path, files):
    odd = tmp_path / "odd"
    with open(files[0], encoding="utf-8") as text:
        odd.write_text(re.sub('"host":"[^"]*"', r'"host":"\\u001b[31mh"', text.read(), count=1), encoding="utf-8")
    for command in (["merge", "-o", tmp_path / "all"], ["summary"]):
        done = tally("trace", *command, odd, *files[1:])
        assert done.returncode == 0 and "rank 0 on ?[31mh" in done.stdout and "\x1b" not in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="not root")
def test_a_device_that_is_full_stays(tmp_path, files):
    device = tmp_path / "full"
    os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(1, 7))
    done = tally("trace", "merge", "-o", device, *files)
    assert done.returncode == 1 and "No space left" in done.stderr and device.exists()


def test_what_is_refused(tmp_path, files):
    with open(files[0], encoding="utf-8") as text:
        whole = text.read()
    empty, other, changed = tmp_path / "empty", tmp_path / "other", tmp_path / "changed"
    changed.write_text(whole.replace('"ph"', '"hp"', 3), encoding="utf-8")
    empty.write_text("", encoding="utf-8")
    other.write_text('{"traceEvents": []}\n', encoding="utf-8")
    for command in ("merge", "summary"):
        for file, word in [
            (changed, "not as Tally writes it"),
            (other, "is no trace of Tally's"),
        ]:
            done = tally("trace", command, files[0], file)
            assert done.returncode == 1 and done.stdout == ""
            assert str(file) in done.stderr and word in done.stderr
        done = tally("trace", command, empty, empty)
        assert done.returncode == 1 and done.stdout == "" and "no file is left" in done.stderr
        done = tally("trace", command, tmp_path / "missing")
        assert done.returncode == 1 and f"cannot open {tmp_path}/missing" in done.stderr
    apart = with_clocks(tmp_path / "apart", files[:RANKS], lambda machine: machine)
    ranks = tally("trace", "merge", *apart)
    assert ranks.returncode == 1 and f"{apart[1]} has no messages in common" in ranks.stderr
    twice = tally("trace", "merge", files[0], files[0])
    assert twice.returncode == 1 and f"{files[0]} has rank 0, and so has another file" in twice.stderr
    unwritable = tally("trace", "merge", "-o", tmp_path / "no" / "folder", *files)
    assert unwritable.returncode == 1 and "cannot write" in unwritable.stderr


@pytest.mark.parametrize(
    "arguments, piece",
    [
        ([], "merge or summary is needed"),
        (["draw"], "merge or summary, not draw"),
        (["merge"], "merge needs files"),
        (["summary", "-o", "x", "y"], "-o goes with merge"),
    ],
)
def test_a_wrong_command_line(arguments, piece):
    done = tally("trace", *arguments)
    assert done.returncode == 2 and piece in done.stderr and done.stdout == ""
