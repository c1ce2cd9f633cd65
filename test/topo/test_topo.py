"""`tally topo` on the machines of the tests, on this one, on files that lie, and beside a library that stands in for
NVIDIA's."""

import json
import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "cli")]
import machines  # noqa: E402
from programs import BUILD, TALLY, environment, tally  # noqa: E402

NAMES = sorted(machines.MACHINES)


def files(name):
    links = HERE / "machines" / f"{name}.links"
    return ["--xml", HERE / "machines" / f"{name}.xml", *(["--links", links] if links.exists() else [])]


def topo(name, *arguments):
    done = tally("topo", "--json", *files(name), *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_files_are_what_their_maker_makes():
    found = {path.name: path.read_text(encoding="ascii") for path in (HERE / "machines").iterdir()}
    assert found == machines.texts(), "test/topo/machines.py writes them"


@pytest.mark.parametrize("machines, group", [("1 machine", 2), ("2 machines", 4)])
def test_the_last_line_is_of_so_many_machines(machines, group):
    """What jobs carry out depends on the number of machines."""
    done = tally("topo", *files("nested"), "-n", machines.split()[0])
    assert done.stdout.endswith(f"Jobs of {machines} with a rank for each GPU, in their order: GPUs in groups of {group}\n")


@pytest.mark.parametrize("name", NAMES)
def test_every_machine_in_every_form(name, tmp_path):
    svg = tmp_path / "machine.svg"
    done = tally("topo", *files(name), "--svg", svg, env={"LC_ALL": "C.UTF-8"})
    assert done.returncode == 0 and done.stderr == ""
    found = topo(name)
    assert f"{len(found['gpus'])} GPU" in done.stdout and done.stdout.count("node ") >= len(found["nodes"])
    for device in found["gpus"] + found["switches"]:
        assert device["address"] in done.stdout or device.get("slice", -1) >= 0
    if found["gpus"]:
        assert found["strategy"] in done.stdout and "<- bottleneck" in done.stdout and "forecast" in done.stdout
    jobs = found["direct"]["in_jobs"]
    assert not found["gpus"] or (f"GPUs in groups of {jobs['group']}\n" if jobs["group"] > 1 else jobs["why"]) in done.stdout
    assert bool(jobs["owners"]) != bool(jobs["why"])
    for note in found["notes"]:
        assert note in done.stdout
    # What the JSON says of links is what its steps add up to, and none is busier than all.
    sums = {}
    for step in found["steps"]:
        for link in step["links"]:
            sums[link] = sums.get(link, 0) + step["bytes"]
    assert sums == pytest.approx({link["link"]: link["bytes"] for link in found["links"]})
    assert all(link["time_s"] is None or link["time_s"] <= found["time_s"] * (1 + 1e-9) for link in found["links"])
    # The drawing: well-formed, within its page, every device once.
    page = ElementTree.parse(svg).getroot()
    wide, high = (float(page.get(side)) for side in ("width", "height"))
    boxes = [box for box in page.iter("{http://www.w3.org/2000/svg}rect") if box.get("x")]
    for box in boxes:
        assert float(box.get("x")) >= 0 and float(box.get("x")) + float(box.get("width")) <= wide
        assert float(box.get("y")) >= 0 and float(box.get("y")) + float(box.get("height")) <= high
    texts = [text.text or "" for text in page.iter("{http://www.w3.org/2000/svg}text")]
    assert all(float(text.get("y")) <= high for text in page.iter("{http://www.w3.org/2000/svg}text"))
    assert sum(t.startswith(("GPU ", "slice ")) and "," not in t for t in texts) == len(found["gpus"])
    assert f"node {found['nodes'][-1]['number']}" in texts


def test_the_tree_in_plain_letters():
    done = tally("topo", *files("pcie"), env={"LC_ALL": "C"})
    assert "|  `- GPU 3  0000:06:00.0  105 Gbit/s" in done.stdout and done.stdout.isascii()


@pytest.mark.parametrize(
    "name, rule, strategy",
    [
        ("pcie", 2, "CPU-assisted aggregation: reduce-scatter and all-gather below each PCIe"),
        ("nvlink", 1, "to GPU 2, 3, and broadcast"),
        ("dgx1", 2, "over NVLink"),
        ("hgx", 2, "over NVLink"),
        ("ports", 2, "every GPU copies its gradients"),
        ("workstation", 0, "within each group"),
        ("virtual", 2, "every GPU copies its gradients"),
        ("one", 0, "the GPU copies"),
        ("mig", 2, "every GPU copies its gradients"),
        ("none", 0, "there is no GPU"),
        ("uneven", 0, "below each PCIe switch"),
        ("nested", 0, "below each topmost PCIe switch"),
    ],
)
def test_the_strategy(name, rule, strategy):
    found = topo(name)
    assert found["rule"] == rule and strategy in found["strategy"]


def test_roots_of_two_groups(tmp_path):
    """NVLinks within each half: roots in each, and the CPU sums across them."""
    path = tmp_path / "links"
    pairs = [(a, b) for half in (0, 4) for a in range(half, half + 4) for b in range(a + 1, half + 4)]
    path.write_text("card all 100G\npcie all 105G\n" + "".join(f"nvlink gpu{a} gpu{b} 400G\n" for a, b in pairs), encoding="ascii")
    done = tally("topo", *files("nvlink")[:2], "--links", path)
    assert "reduce over NVLink to GPU 2 to 7, and broadcast from there; the CPU sums across groups" in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_direct_copies_alone(name):
    """Owners copy from each GPU of their group, and it says so where another way is better."""
    found, text = topo(name), tally("topo", *files(name)).stdout
    direct = found["direct"]
    group, share = direct["group_of_gpu"], direct["share_of_gpu"]
    copies = [step for step in direct["steps"] if step["from"][0] == step["to"][0] == "gpu"]
    for step in copies:
        (_, giver), (_, taker) = step["from"], step["to"]
        assert group[giver] == group[taker] and share[taker if step["stage"] == 1 else giver] > 0
    count = {g: group.count(g) for g in group}
    assert len(copies) == sum(2 * (count[g] - 1) for g, s in zip(group, share) if s > 0)
    sums = {}
    for step in direct["steps"]:
        for link in step["links"]:
            sums[link] = sums.get(link, 0) + step["bytes"]
    assert sums == pytest.approx({link["link"]: link["bytes"] for link in direct["links"]})
    assert direct["time_s"] >= found["time_s"] * (1 - 1e-9)
    assert ("with direct copies alone: " + direct["strategy"] in text) == (name == "dgx1")


def test_pieces_in_virtual_time():
    found = topo("pcie", "--flow", "1M,4,5")["direct"]
    flow = found["flow"]
    assert flow["pieces"] == 100 and (flow["piece"], flow["steps"], flow["delay_s"]) == (1 << 20, 4, 5e-6)
    assert found["time_s"] < flow["time_s"] < 2 * found["time_s"]
    text = tally("topo", *files("pcie"), "--flow", "1M,4,5").stdout
    assert f"in virtual time, in pieces of 1 MB: {1e3 * flow['time_s']:.2f} ms, {100 * found['time_s'] / flow['time_s']:.1f}% of" in text
    assert topo("pcie", "--flow", "1M,1")["direct"]["flow"]["time_s"] > topo("pcie", "--flow", "1M")["direct"]["flow"]["time_s"]
    assert "flow" not in topo("pcie")["direct"] and topo("none", "--flow", "1M")["direct"]["flow"]["time_s"] == 0


def test_what_a_better_place_would_bring():
    text = tally("topo", *files("uneven")).stdout
    assert "better placement: card eth0 at a port of its own" in text and "33% less" in text
    assert topo("pcie")["better"] == []


def test_the_job_counts():
    assert topo("nvlink", "-n", 8, "-k", 8)["traffic"] == 1 and topo("nvlink", "-n", 1)["traffic"] == 0
    assert topo("nvlink", "-M", "1G")["time_s"] == pytest.approx(10.24 * topo("nvlink", "-M", "100M")["time_s"], rel=1e-6)


def test_every_rate_says_where_it_is_from():
    assert {link["source"] for link in topo("nvlink")["nvlinks"]} == {"given"}
    found = topo("pcie")
    assert found["gpus"][0]["pcie"]["source"] == "given" and found["nodes"][0]["bandwidth"]["source"] == "unknown"


def test_this_machine():
    found = json.loads(tally("topo", "--json").stdout)
    assert sum(node["cores"] for node in found["nodes"]) >= 1
    assert sum(node["memory_bytes"] for node in found["nodes"]) > 2**26
    known = {name for card in found["cards"] for name in (card["name"],) if name}
    assert known <= set(os.listdir("/sys/class/net"))
    text = tally("topo").stdout
    assert "cores" in text and all(name in text for name in known)


def with_fake(words, *arguments):
    folder = BUILD / "meson" / "test" / "topo"
    if not (folder / "libnvidia-ml.so.1").exists():
        pytest.skip("the library that stands in for NVIDIA's is not built")
    return tally("topo", *arguments, env={"LD_LIBRARY_PATH": str(folder), "FAKE_NVML": words})


def test_gpus_that_only_nvml_knows():
    """As in a container that hides the bus."""
    gpus = " ".join(f"gpu=0000:{bus:02x}:1f.0" for bus in range(0x40, 0x48))
    done = with_fake(f"{gpus} speed=26562 " + " ".join(f"switch={i}:18" for i in range(8)), "--json", "-n", "1")
    found = json.loads(done.stdout)
    assert len(found["gpus"]) == 8 and found["rule"] == 2
    assert found["gpus"][7]["name"] == "Fake GPU" and found["gpus"][0]["nvswitch"]["bits_per_s"] == 18 * 26562e6 * 8
    assert sum("not visible on the bus" in note for note in found["notes"]) == 8


def test_nvml_that_fails_half_way():
    done = with_fake("gpu=0000:40:1f.0 gpu=0000:41:1f.0 gpu=0000:42:1f.0 fail=pci:1")
    assert done.returncode == 0 and "NVML fails at GPU 1: GPU is lost" in done.stdout and "1 GPU," in done.stdout
    done = with_fake("fail=start")
    assert done.returncode == 0 and "NVML does not start: Driver Not Loaded" in done.stdout


def test_sixty_four_gpus_with_odd_names(tmp_path):
    svg = tmp_path / "m.svg"
    done = with_fake("odd " + " ".join(f"gpu=0000:{i:02x}:1f.0" for i in range(64)), "--svg", svg)
    assert done.returncode == 0 and "64 GPUs" in done.stdout and "\033" not in done.stdout
    ElementTree.parse(svg)
    done = with_fake("odd gpu=0000:40:1f.0", "--json")
    assert json.loads(done.stdout)["gpus"][0]["name"].startswith('GPU?[31m "<&>" of a name')


@pytest.mark.parametrize(
    "text, piece",
    [
        ("", "no machine in it"),
        ("\0\0\0", "no machine in it"),
        ("<topology version='1.0'/>", "is not the XML of hwloc 2"),
        ("<topology version='2.0'><object type='Machine'>", "line 1: the file ends before"),
        ("<topology version='2.0'><object type='Machine'><object type='PCIDev' pci_busid='x'/></object></topology>", "no PCI address"),
        ("<!DOCTYPE t [<!ENTITY a 'aaaa'>]><topology version='2.0'/>", "declarations of its own"),
    ],
)
def test_files_that_lie(tmp_path, text, piece):
    path = tmp_path / "machine.xml"
    path.write_text(text, encoding="ascii")
    done = tally("topo", "--xml", path)
    assert done.returncode == 1 and done.stdout == "" and piece in done.stderr and str(path) in done.stderr
    assert done.stderr.count("\n") == 1


def test_switches_too_deep(tmp_path):
    text = "<topology version='2.0'><object type='Machine'><object type='NUMANode'/><object type='Bridge' bridge_type='0-1'>"
    gpu = "<object type='PCIDev' pci_busid='0000:{:02x}:00.0' pci_type='0302 [10de:1]'/>"
    for bus in range(10):
        text += f"<object type='Bridge' pci_busid='0000:{bus:02x}:01.0' bridge_type='1-1'>" + gpu.format(bus)
    path = tmp_path / "machine.xml"
    path.write_text(text + gpu.format(10) + "</object>" * 12 + "</topology>", encoding="ascii")
    for command in (["topo", "--xml"], ["plan", "-n", 2, "--topo"]):
        done = tally(*command, path)
        assert done.returncode == 1 and done.stdout == "" and f"{path}: its PCIe switches are more than 8 deep" in done.stderr


def test_too_many_slices(tmp_path):
    path = tmp_path / "links"
    path.write_text("".join(f"slices gpu{gpu} 8\n" for gpu in range(8)), encoding="ascii")
    assert tally("topo", *files("ports")[:2], "--links", path, "--json").returncode == 0
    more = tmp_path / "machine.xml"
    text = pathlib.Path(files("ports")[1]).read_text(encoding="ascii")
    device = "<object type='PCIDev' pci_busid='0000:fe:00.0' pci_type='0302 [10de:1]'/>"
    more.write_text(text.replace("</topology>", device + "</topology>"), encoding="ascii")
    done = tally("topo", "--xml", more, "--links", path)
    assert done.returncode == 1 and f"{path}: with all slices" in done.stderr


@pytest.mark.parametrize(
    "arguments, status, piece",
    [
        (["--xml", "/no/such/file"], 1, "cannot open /no/such/file"),
        (["--xml", "/"], 1, "cannot read /"),
        (["--links", "/no/such/file"], 1, "cannot open /no/such/file"),
        (["--svg", "/no/such/file"], 1, "cannot write /no/such/file"),
        (["--svg", "/dev/full"], 1, "cannot write /dev/full"),
        (["-n", "0"], 2, "-n 0"),
        (["-k", "-1"], 2, "-k -1"),
        (["-M", "2T"], 2, "-M 2T"),
        (["-M", "much"], 2, "-M much"),
        (["--flow", "much"], 2, "--flow much"),
        (["--flow", "1M,0"], 2, "--flow 1M,0"),
        (["--flow", "1M,2,x"], 2, "--flow 1M,2,x"),
        (["--flow", "1M,2,-1"], 2, "--flow 1M,2,-1"),
        (["--flow", "1", "--xml", files("pcie")[1]], 1, "more than a million pieces"),
        (["--xml", "-", "--links", "-"], 2, "only one of"),
        (["else"], 2, "unexpected argument else"),
    ],
)
def test_wrong_command_lines(arguments, status, piece):
    done = tally("topo", *arguments)
    assert done.returncode == status and piece in done.stderr and done.stdout == ""


@pytest.mark.parametrize("arguments", [["-n", 2, "--topo", "-", "--links", "-"], ["--machines", "-", "--topo", "-"]])
def test_a_plan_reads_standard_input_once(arguments):
    done = tally("plan", *arguments)
    assert done.returncode == 2 and "only one of --machines, --topo and --links" in done.stderr


def test_a_list_of_links_that_is_wrong(tmp_path):
    path = tmp_path / "links"
    path.write_text("# two\nnvlink gpu0 gpu1 0\n", encoding="ascii")
    done = tally("topo", *files("pcie")[:2], "--links", path)
    assert done.returncode == 1 and f'{path}, line 2: "0" is no rate' in done.stderr


def test_standard_input():
    with open(HERE / "machines" / "pcie.xml", encoding="ascii") as xml:
        done = subprocess.run([TALLY, "topo", "--xml", "-", "--json"], stdin=xml, capture_output=True, text=True, env=environment())
    assert done.returncode == 0 and len(json.loads(done.stdout)["gpus"]) == 8
