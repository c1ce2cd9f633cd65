"""Makes the machines of the tests: hwloc's XML, as `lstopo` writes it, and the list of what that cannot say.

    test/topo/machines.py            # writes machines/*.xml and machines/*.links anew

They are described here and written by hand, not taken from anybody's machine.
"""

import pathlib
from xml.sax.saxutils import quoteattr

FOLDER = pathlib.Path(__file__).resolve().parent / "machines"

GEN3, GEN4, GEN5 = 15.753846, 31.507692, 63.015385

# nvidia-smi's matrix of a DGX-1 with V100: how many links of 25 GB/s there are between two GPUs.
CUBE = ["-1122...", "1-21.2..", "12-2..1.", "212-...1", "2...-112", ".2..1-21", "..1.12-2", "...1212-"]


class Writer:
    """hwloc's elements, with its running numbers."""

    def __init__(self):
        self.lines = ['<?xml version="1.0" encoding="UTF-8"?>', '<!DOCTYPE topology SYSTEM "hwloc2.dtd">']
        self.lines.append('<topology version="2.0">')
        self.depth, self.index = 1, 0

    def put(self, text):
        self.lines.append("  " * self.depth + text)

    def open(self, kind, **attributes):
        self.index += 1
        attributes = {"type": kind, **attributes, "gp_index": self.index}
        self.put("<object " + " ".join(f"{k}={quoteattr(str(v))}" for k, v in attributes.items()) + ">")
        self.depth += 1

    def close(self):
        self.depth -= 1
        self.put("</object>")

    def info(self, name, value):
        self.put(f"<info name={quoteattr(name)} value={quoteattr(value)}/>")

    def text(self):
        return "\n".join(self.lines + ["</topology>", ""])


def mask(bits):
    return f"0x{sum(1 << b for b in bits):08x}"


class Gpu:
    def __init__(self, name, device, gen):
        self.name, self.device, self.gen = name, device, gen

    def write(self, w, address):
        w.open("PCIDev", pci_busid=address, pci_type=f"0302 [10de:{self.device}] [10de:1214] a1", pci_link_speed=f"{self.gen:.6f}")
        w.info("PCIVendor", "NVIDIA Corporation")
        w.info("PCIDevice", self.name)
        w.close()


class NvSwitch:
    gen = GEN4

    def write(self, w, address):
        w.open("PCIDev", pci_busid=address, pci_type="0680 [10de:22a3] [10de:1796] a1", pci_link_speed=f"{self.gen:.6f}")
        w.info("PCIDevice", "GH100 [H100 NVSwitch]")
        w.close()


class Card:
    def __init__(self, name, gen, rdma=None, ports=1, device="15b3:1019", kind="0200"):
        self.name, self.gen, self.rdma, self.ports, self.device, self.kind = name, gen, rdma, ports, device, kind

    def write(self, w, address):
        for port in range(self.ports):
            w.open("PCIDev", pci_busid=f"{address[:-1]}{port}", pci_type=f"{self.kind} [{self.device}] [{self.device}] 00", pci_link_speed=f"{self.gen:.6f}")
            name = self.name if port == 0 else f"{self.name}p{port}"
            w.open("OSDev", name=name, osdev_type="2")
            w.info("Address", f"02:00:00:00:00:{int(address[5:7], 16):02x}")
            w.close()
            if self.rdma and port == 0:
                w.open("OSDev", name=self.rdma, osdev_type="3")
                w.close()
            w.close()


class Port:
    """A root port, with one device or switch."""

    def __init__(self, below):
        self.below = below

    def write(self, w, bus, address):
        gen, last = self.below.gen, bus + reach(self.below)
        w.open("Bridge", bridge_type="1-1", depth="1", bridge_pci=f"0000:[{bus + 1:02x}-{last:02x}]", pci_busid=address, pci_type="0604 [8086:2030] [0000:0000] 04", pci_link_speed=f"{gen:.6f}")
        if isinstance(self.below, Switch):
            self.below.write(w, bus + 1, 2)
        else:
            self.below.write(w, f"0000:{bus + 1:02x}:00.0")
        w.close()
        return last


class Switch:
    """A PCIe switch: the port towards the processor, and one for each device or switch below."""

    def __init__(self, *below, gen=GEN3):
        self.below, self.gen = below, gen

    def write(self, w, bus, depth):
        last = bus + reach(self) - 1
        port = dict(pci_type="0604 [10b5:9765] [0000:0000] aa")
        w.open("Bridge", bridge_type="1-1", depth=depth, bridge_pci=f"0000:[{bus + 1:02x}-{last:02x}]", pci_busid=f"0000:{bus:02x}:00.0", **port, pci_link_speed=f"{self.gen:.6f}")
        w.info("PCIDevice", "PEX 9765 PCIe switch")
        at = bus + 2
        for i, device in enumerate(self.below):
            end = at + reach(device) - 1
            w.open("Bridge", bridge_type="1-1", depth=depth + 1, bridge_pci=f"0000:[{at:02x}-{end:02x}]", pci_busid=f"0000:{bus + 1:02x}:{i:02x}.0", **port, pci_link_speed=f"{device.gen:.6f}")
            if isinstance(device, Switch):
                device.write(w, at, depth + 2)
            else:
                device.write(w, f"0000:{at:02x}:00.0")
            w.close()
            at = end + 1
        w.close()


def reach(device):
    """How many buses it takes."""
    return 2 + sum(map(reach, device.below)) if isinstance(device, Switch) else 1


def write_node(w, node, cores, memory):
    """A package with its memory and cores; stays open."""
    bits = range(node * cores, (node + 1) * cores)
    sets = dict(cpuset=mask(bits), complete_cpuset=mask(bits), nodeset=mask([node]), complete_nodeset=mask([node]))
    w.open("Package", os_index=node, **sets)
    w.info("CPUModel", "A processor")
    w.open("NUMANode", os_index=node, **sets, local_memory=memory)
    w.close()
    for core in bits:
        one = {**sets, "cpuset": mask([core]), "complete_cpuset": mask([core])}
        w.open("Core", os_index=core - node * cores, **one)
        w.open("PU", os_index=core, **one)
        w.close()
        w.close()


def write_bus(w, ports, bus):
    w.open("Bridge", bridge_type="0-1", depth="0", bridge_pci=f"0000:[{bus:02x}-{bus + 0x7F:02x}]")
    at = bus
    for i, port in enumerate(ports):
        if isinstance(port, Port):
            at = port.write(w, at, f"0000:{bus:02x}:{i + 1:02x}.0")
        else:
            port.write(w, f"0000:{bus:02x}:{i + 1:02x}.0")
    w.close()


def machine(*nodes, cores=8, memory=192 << 30):
    """XML; each node is a list of what is at its root ports, at most two nodes."""
    w = Writer()
    everything, all_nodes = mask(range(cores * len(nodes))), mask(range(len(nodes)))
    w.open("Machine", os_index=0, cpuset=everything, complete_cpuset=everything, allowed_cpuset=everything, nodeset=all_nodes, complete_nodeset=all_nodes, allowed_nodeset=all_nodes)
    w.info("Backend", "Linux")
    for i, ports in enumerate(nodes):
        write_node(w, i, cores, memory)
        if ports:
            write_bus(w, ports, 0x80 * i)
        w.close()
    w.close()
    return w.text()


def v100():
    return Gpu("GV100GL [Tesla V100 SXM2 32GB]", "1db5", GEN3)


def cube():
    lines = []
    for a, row in enumerate(CUBE):
        lines += [f"nvlink gpu{a} gpu{b} {int(n) * 200}G" for b, n in enumerate(row) if b > a and n.isdigit()]
    return lines


PAPER = ["# What BytePS measured on its machines.", "pcie all 105G", "across 80G", "socket 300G"]


def pcie():
    """Two switches of four GPUs, a card on one of the processors."""
    gpus = [Gpu("GV100GL [Tesla V100 PCIe 32GB]", "1db6", GEN3) for _ in range(8)]
    card = Card("eth0", GEN3, rdma="mlx5_0")
    return machine([Port(Switch(*gpus[:4])), Port(card)], [Port(Switch(*gpus[4:]))]), PAPER + ["card eth0 100G"]


def nvlink(cards=1):
    """Four switches of two GPUs, NVLinks, a card at the first."""
    gpus = [v100() for _ in range(8)]
    names = [Card(f"eth{i}", GEN3, rdma=f"mlx5_{i}") for i in range(4)]
    switches = [Port(Switch(*gpus[2 * i : 2 * i + 2], *names[i : i + 1][: i < cards])) for i in range(4)]
    return machine(switches[:2], switches[2:]), PAPER + ["card all 100G"] + cube()


def hgx():
    """Eight switches with a GPU and a card each, NVSwitches."""
    pairs = [Port(Switch(Gpu("GH100 [H100 SXM5 80GB]", "2330", GEN5), Card(f"ib{i}", GEN5, rdma=f"mlx5_{i}", kind="0207"), gen=GEN5)) for i in range(8)]
    management = Port(Card("eno1", 3.938462, ports=2, device="8086:1563"))
    lines = ["nvswitch all 3600G", "card eno1 10G", *(f"card mlx5_{i} 400G" for i in range(8))]
    return machine([*pairs[:4], Port(Switch(*(NvSwitch() for _ in range(4)), gen=GEN4)), management], pairs[4:], memory=1 << 40), lines


def ports():
    """Eight GPUs, each at a root port, without NVLink."""
    gpus = [Port(Gpu("AD102GL [L40S]", "26b9", GEN4)) for _ in range(8)]
    return machine([*gpus[:4], Port(Card("eth0", GEN4))], gpus[4:]), ["card eth0 100G"]


def workstation():
    """Four GPUs, two and two joined by a bridge, and the card of the board."""
    gpus = [Port(Gpu("GA102 [GeForce RTX 3090]", "2204", GEN4)) for _ in range(4)]
    card = Port(Card("enp5s0", 3.938462, device="1d6a:07b1"))
    return machine([*gpus, card], cores=16), ["nvlink gpu0 gpu1 450G", "nvlink gpu2 gpu3 450G", "card enp5s0 10G"]


def virtual():
    """Eight GPUs and a card in a virtual machine that shows them side by side, without speeds."""
    gpus = [Gpu("GA100 [A100 SXM4 40GB]", "20b0", 0.0) for _ in range(8)]
    return machine([*gpus, Card("ens5", 0.0, device="1d0f:ec20")]), []


def one():
    """A GPU and a card."""
    return machine([Port(Gpu("TU104GL [Tesla T4]", "1eb8", GEN3)), Port(Card("eth0", GEN3))]), ["card eth0 25G"]


def mig():
    """Two GPUs, one cut into seven slices, one into three."""
    gpus = [Port(Gpu("GA100 [A100 PCIe 80GB]", "20b5", GEN4)) for _ in range(2)]
    return machine([gpus[0], Port(Card("eth0", GEN4))], [gpus[1]]), ["card eth0 100G", "slices gpu0 7", "slices gpu1 3"]


def none():
    """No GPU: cores, memory, a card with two ports."""
    return machine([Port(Card("eth0", 7.876923, ports=2))], []), ["card eth0 25G"]


def uneven():
    """Two switches of four GPUs, without NVLink, and the card at one of them: none of the paper's rules."""
    gpus = [Gpu("GV100GL [Tesla V100 PCIe 32GB]", "1db6", GEN3) for _ in range(8)]
    return machine([Port(Switch(*gpus[:4], Card("eth0", GEN3)))], [Port(Switch(*gpus[4:]))]), PAPER + ["card eth0 100G"]


def nested():
    """Switches below switches: two of two GPUs each below one, on each processor."""
    gpus = [Gpu("GA100 [A100 PCIe 80GB]", "20b5", GEN4) for _ in range(8)]
    inner = [Switch(*gpus[2 * i : 2 * i + 2], gen=GEN4) for i in range(4)]
    outer = [Switch(*inner[:2], gen=GEN4), Switch(*inner[2:], Card("eth0", GEN4), gen=GEN4)]
    return machine([Port(outer[0])], [Port(outer[1])]), ["card eth0 200G"]


MACHINES = {
    "pcie": pcie,
    "nvlink": nvlink,
    "dgx1": lambda: nvlink(4),
    "hgx": hgx,
    "ports": ports,
    "workstation": workstation,
    "virtual": virtual,
    "one": one,
    "mig": mig,
    "none": none,
    "uneven": uneven,
    "nested": nested,
}


def texts():
    """{file name: text}"""
    found = {}
    for name, make in MACHINES.items():
        xml, lines = make()
        found[f"{name}.xml"] = xml
        if lines:
            found[f"{name}.links"] = "\n".join(lines) + "\n"
    return found


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in texts().items():
        (FOLDER / file).write_text(text, encoding="ascii")
