"""The files of a folder use each other in one direction: no file reaches itself through others.  So a file can be read,
tested and replaced with only what is below it.

A file uses another if it calls, or takes the address of, a function or a table that the other one defines.  What a file
gets as a callback, or finds in a list, it does not use: rule.c lists the rules of operations, ways.c the ways on one machine.
"""

import re

import pytest
from tree import ROOT, files

# How many files a folder has at least, and the circles that it has still: this list may only shrink.
FOLDERS = {"base": 10, "comm": 25, "membership": 15, "local": 15, "ops": 7, "plan": 9, "reduce": 3, "sched": 1, "sum": 20, "topo": 2}
FOLDERS |= {"inside": 6, "machine": 6, "tallyd": 2, "trace": 3, "transport": 15, "wire": 3, "cli": 10, "mpi": 4, "device": 1}
CIRCLES = {"mpi": ["message.c", "world.c"]}
LISTS = ("rule.c", "media.c", "stages.c", "ways.c")

# Shared names are defined at the beginning of a line: "int tly_x(", "const struct tly_rule tly_rule_sum = {".
DEFINED = re.compile(r"^(?!static|extern|typedef|#)[A-Za-z_][\w \*]*?\b(tly_\w+)\s*(\([^;]*?\)\s*\{|=)", re.MULTILINE)
COMMENT = re.compile(r'/\*.*?\*/|"(?:[^"\\]|\\.)*"', re.DOTALL)


def uses(sources):
    """{file: files whose shared names it has}.  sources: {name: text}"""
    plain = {name: COMMENT.sub("", text) for name, text in sources.items()}
    found = [(symbol, name, rest == "=") for name, text in plain.items() for symbol, rest in DEFINED.findall(text)]
    owner = {symbol: name for symbol, name, _ in found}
    listed = {symbol for symbol, _, is_table in found if is_table}
    graph = {}
    for name, text in plain.items():
        words = set(re.findall(r"(?<!struct )\btly_\w+", text)) - (listed if name.rpartition("/")[2] in LISTS else set())
        graph[name] = {owner[word] for word in words if owner.get(word, name) != name}
    return graph


def circles(graph):
    """The files that reach themselves."""
    reached = {name: set(next_ones) for name, next_ones in graph.items()}
    for _ in graph:
        for name in graph:
            reached[name] |= set().union(*(reached[other] for other in reached[name]))
    return sorted(name for name in graph if name in reached[name])


def sources_of(folder):
    paths = [path for path in files(f"src/{folder}/*.c") if not path.name.endswith("_test.c")]
    return {str(path.relative_to(ROOT / "src" / folder)): path.read_text(encoding="utf-8") for path in paths}


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_reaches_itself(folder):
    graph = uses(sources_of(folder))
    assert len(graph) >= FOLDERS[folder]
    assert circles(graph) == CIRCLES.get(folder, [])


def test_all_folders_are_looked_at():
    assert sorted(FOLDERS) == sorted(path.name for path in (ROOT / "src").iterdir() if path.is_dir())


def test_uses_are_found():
    assert "store.c" in uses(sources_of("sum"))["round.c"]


@pytest.mark.parametrize(
    ("folder", "header", "least"), [("sum", "internal.h", 16), ("membership", "internal.h", 9), ("local", "local.h", 22)]
)
def test_files_use_those_above_them_in_the_list(folder, header, least):
    comment = (ROOT / "src" / folder / header).read_text(encoding="utf-8").split("*/")[0]
    order = re.findall(r"^ \*   (\w+\.c)", comment, re.MULTILINE)
    place = {name: i for i, name in enumerate(order)}
    assert len(place) >= least
    for name, used in uses(sources_of(folder)).items():
        assert [other for other in used if place.get(other, -1) > place.get(name, -1)] == [], name


# Numbers of operations, and a comparison with one.
NUMBER = re.compile(r"\bTALLY_(?:PUSH_PULLV?|BROADCAST|ALLGATHER|BARRIER|REDUCE(?:_SCATTER)?|ALLTOALL|GATHER|SCATTER|MESSAGE|SHARED_(?:CREATE|ADD|READ))\b"
                    r"|\bTLY_(?:PROBE|JOIN)\b|\bkind [=!]= (?:[1-9]|T)")
# Files that make operations, and the header that numbers them.  src/ops and the interfaces (src/mpi) may name them.
MAKERS = {"comm": "calls.c shared.c op/joining.c", "wire": "frame.h"}


@pytest.mark.parametrize("folder", sorted(FOLDERS.keys() - {"ops", "mpi"}))
def test_a_folder_names_no_operation(folder):
    headers = {path.name: path.read_text(encoding="utf-8") for path in files(f"src/{folder}/*.h")}
    for name, text in (sources_of(folder) | headers).items():
        if name not in MAKERS.get(folder, "").split():
            assert NUMBER.findall(COMMENT.sub("", text)) == [], name


def test_numbers_of_operations_are_found():
    assert NUMBER.findall("if (op->kind == TALLY_REDUCE || f.kind != 3) x = TLY_JOIN;") == ["kind == T", "kind != 3", "TLY_JOIN"]


def test_the_check_itself():
    sources = {
        "a.c": "int tly_a(int x)\n{\n    return tly_b(x);\n}\n",
        "b.c": "void tly_b(int x,\n           int y)\n{\n    tly_c();\n}\n",
        "c.c": "int tly_c(void)\n{\n    return tly_a(0);\n}\n/* tly_d() */\n",
        "d.c": "const struct t tly_d = {0};\nint tly_e(void)\n{\n    return tly_a(1);\n}\n",
        "rule.c": "const struct t *tly_f(void)\n{\n    tly_e();\n    return &tly_d;\n}\n",
        "media.c": "const struct t *tly_g(void)\n{\n    return &tly_d;\n}\n",
    }
    graph = uses(sources)
    expected = {"a.c": {"b.c"}, "b.c": {"c.c"}, "c.c": {"a.c"}, "d.c": {"a.c"}, "rule.c": {"d.c"}, "media.c": set()}
    assert graph == expected
    assert circles(graph) == ["a.c", "b.c", "c.c"]
    assert circles({"a": {"b"}, "b": set()}) == []
