"""The files of src/sum/ use each other in one direction: no file reaches itself through others.

A file uses another if it calls, or takes the address of, a function or a table that the other one defines.  What a file
gets as a callback, or finds in the table of kinds (kind.c lists kinds/), it does not use.
"""

import pathlib
import re

from tree import ROOT, files

# Shared names are defined at the beginning of a line: "int tly_x(", "const struct tly_kind tly_kind_sum = {".
DEFINED = re.compile(r"^(?!static|extern|typedef|#)[A-Za-z_][\w \*]*?\b(tly_\w+)\s*(?:\([^;]*?\)\s*\{|=)", re.MULTILINE)
COMMENT = re.compile(r'/\*.*?\*/|"(?:[^"\\]|\\.)*"', re.DOTALL)


def uses(sources):
    """{file: files whose shared names it has}.  sources: {name: text}"""
    plain = {name: COMMENT.sub("", text) for name, text in sources.items()}
    owner = {symbol: name for name, text in plain.items() for symbol in DEFINED.findall(text)}
    return {
        name: {owner[word] for word in re.findall(r"(?<!struct )\btly_\w+", text) if owner.get(word, name) != name}
        for name, text in plain.items()
        if name != "kind.c"
    } | {"kind.c": set()}


def circles(graph):
    """The files that reach themselves."""
    reached = {name: set(next_ones) for name, next_ones in graph.items()}
    for _ in graph:
        for name in graph:
            reached[name] |= set().union(*(reached[other] for other in reached[name]))
    return sorted(name for name in graph if name in reached[name])


def sum_sources():
    paths = [path for path in files("src/sum/*.c") if not path.name.endswith("_test.c")]
    return {str(path.relative_to(ROOT / "src/sum")): path.read_text(encoding="utf-8") for path in paths}


def test_no_file_of_the_service_reaches_itself():
    graph = uses(sum_sources())
    assert len(graph) > 20
    assert "store.c" in graph["round.c"]
    assert circles(graph) == []


def test_files_use_only_those_above_them_in_the_list():
    comment = (ROOT / "src/sum/internal.h").read_text(encoding="utf-8").split("*/")[0]
    order = re.findall(r"\b(\w+\.c|kinds/)", comment.split("in this list")[1].split("\n", 2)[2])
    place = {name: i for i, name in enumerate(order)}
    for name, used in uses(sum_sources()).items():
        if name != "kind.c":
            at = place[re.sub(r"^kinds/.*", "kinds/", name)]
            assert [other for other in used - {"kind.c"} if place[re.sub(r"^kinds/.*", "kinds/", other)] > at] == [], name
    assert len(place) > 15


def test_only_the_table_of_kinds_names_a_kind():
    kinds = {pathlib.Path(name).name for name in sum_sources() if name.startswith("kinds/")}
    assert {"sum.c", "list.c", "table.c", "root.c", "probe.c"} <= kinds
    for name, text in sum_sources().items():
        if name != "kind.c" and not name.startswith("kinds/"):
            code = COMMENT.sub("", text)
            assert re.findall(r"\bTALLY_(?:PUSH_PULL|BROADCAST|ALLGATHER|BARRIER|REDUCE|REDUCE_SCATTER)\b", code) == [], name
            assert re.findall(r"\b(?:TALLY_(?:ALLTOALL|GATHER|SCATTER|MESSAGE)|TLY_PROBE)\b", code) == [], name


def test_the_check_itself():
    sources = {
        "a.c": "int tly_a(int x)\n{\n    return tly_b(x);\n}\n",
        "b.c": "void tly_b(int x,\n           int y)\n{\n    tly_c();\n}\n",
        "c.c": "int tly_c(void)\n{\n    return tly_a(0);\n}\n/* tly_d() */\n",
        "d.c": "const struct t tly_d = {0};\nint tly_e(void)\n{\n    return tly_a(1);\n}\n",
    }
    graph = uses(sources)
    assert graph == {"a.c": {"b.c"}, "b.c": {"c.c"}, "c.c": {"a.c"}, "d.c": {"a.c"}, "kind.c": set()}
    assert circles(graph) == ["a.c", "b.c", "c.c"]
    assert circles({"a": {"b"}, "b": set()}) == []
