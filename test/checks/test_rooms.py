"""The modules of python/tally import only those before them (MODULES).  The rooms of python/tally/torch: a room imports the
modules that all share and, of other rooms, those that the docstring of its __init__.py allows ("Uses crossing, group.").  The
docstring lists the room's files.  patches.py alone takes private names of PyTorch and replaces functions of it."""

import ast
import re

import pytest
from tree import ROOT, files

MODULES = ("_address", "_where", "_lib", "_leaving", "_errors", "_waits", "_events", "_job", "_memory", "_calls", "_operations",
           "_array")
TORCH = ROOT / "python" / "tally" / "torch"
ROOMS = sorted(path.parent.name for path in files("python/tally/torch/*/__init__.py"))
SHARED = {"calls", "device", "meeting", "patches", "pool", "process_sets", "steps"}  # modules that no room's files stand below
IMPORT = re.compile(r"^ *from (\.+)([\w.]*) import (\([^)]*\)|[^\n(#]*)", re.MULTILINE)


def used(text, room):
    """Modules and rooms of tally.torch that a file of this room (None: of none) imports."""
    found = set()
    for dots, module, names in IMPORT.findall(text):
        level = len(dots) - (room is not None)  # 1: tally.torch, 2: tally
        if level == 1 and module:
            found.add(module.split(".")[0])
        elif level == 1:
            found |= {name.split(" as ")[0].strip() for name in names.strip("()").split(",")}
    return found - {""}


def taken(text):
    """Private names that a file takes of torch's modules and classes, and those that it sets there."""
    tree, roots, found = ast.parse(text), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {one.asname or "torch" for one in node.names if one.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] == "torch":
            roots |= {one.asname or one.name for one in node.names}
            found |= {one for one in (*node.module.split("."), *[one.name for one in node.names]) if one[0] == "_"}
    for node in ast.walk(tree):
        base = node
        while isinstance(base, ast.Attribute):
            base = base.value
        if base is not node and isinstance(base, ast.Name) and base.id in roots:
            if isinstance(node.ctx, ast.Store) or node.attr[0] == "_" != node.attr[1]:
                found.add(node.attr)
    return found


def docstring(room):
    return (TORCH / room / "__init__.py").read_text(encoding="utf-8")


def allowed(text):
    """The rooms that a docstring allows."""
    line = re.search(r"^Uses ([\w, ]+)\.$", text, re.MULTILINE)[1]
    return set() if line == "no other room" else set(line.split(", "))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_uses_what_it_may(room):
    may = SHARED | allowed(docstring(room))
    assert allowed(docstring(room)) <= set(ROOMS)
    for path in files(f"python/tally/torch/{room}/*.py"):
        assert sorted(used(path.read_text(encoding="utf-8"), room) - may) == [], path.name


def test_rooms_have_no_cycles():
    left = {room: allowed(docstring(room)) for room in ROOMS}
    while left:
        free = [room for room, uses in left.items() if not uses & left.keys()]
        assert free, left
        for room in free:
            del left[room]


def test_shared_modules_use_no_room():
    for name in SHARED:
        assert sorted(used((TORCH / f"{name}.py").read_text(encoding="utf-8"), None) & set(ROOMS)) == [], name


def test_modules_import_those_before_them():
    paths = {path.stem: path for path in files("python/tally/*.py") if path.parent.name == "tally"}
    assert sorted(paths) == sorted((*MODULES, "__init__"))
    for place, name in enumerate(MODULES):
        assert sorted(used(paths[name].read_text(encoding="utf-8"), None) - set(MODULES[:place])) == [], name


def test_only_one_file_patches_torch():
    for path in files("python/tally/torch/*.py"):
        if path != TORCH / "patches.py":
            assert sorted(taken(path.read_text(encoding="utf-8"))) == [], path
    assert len(taken((TORCH / "patches.py").read_text(encoding="utf-8"))) > 20


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_list_all_files(room):
    listed = re.findall(r"^    (\w+\.py) ", docstring(room), re.MULTILINE)
    assert sorted(listed) == sorted(p.name for p in files(f"python/tally/torch/{room}/*.py") if p.name != "__init__.py")


def test_the_check_itself():
    text = "from ... import _job\nfrom .. import calls, device as x\nfrom ..group.work import (a,\n    b)\n    from . import y\n"
    assert used(text, "ddp") == {"calls", "device", "group"}
    assert used("from . import calls, steps  # why\nfrom .group.work import x\nfrom .. import _job\n", None) == {"calls", "steps", "group"}
    text = "import torch.x as y\nfrom torch import nn\ny._a.b()\nnn.c.__doc__\nnn.d = 1\nself._e\nfrom torch._f import _g, h\nh._i"
    assert taken(text) == {"_a", "d", "_f", "_g", "_i"}
    assert allowed("x\n\nUses a, b.\n") == {"a", "b"}
    assert allowed("Uses no other room.\n") == set()
