"""State has an owner: the structs inside the communicator, an operation, a connection and a part belong to one file each.

`struct tally_comm` (src/comm/comm.h) and `struct tally_op` (src/comm/op/op.h) hold such structs by value.  OWNERS says whose they
are.  Only these files and headers name their fields; others pass the struct's address to a function or to an inline function
of the header.  What else the shared structs hold is named in several files: a field that one file alone uses belongs into
that file's struct.

The sources are read by regular expressions, so a struct is known by the field that holds it ("c->names.") and by the pointers
that a file declares to it ("struct tly_names *n", then "n->").
"""

import re

import pytest
from test_circles import COMMENT
from tree import files

MOST_FIELDS = {"tally_comm": 40, "tally_op": 40}

# What the sources call one of them, before "->" or ".".  "": no matter what, so that fields of other structs count, too.
SHARED = {
    "tally_comm": r"\b(?:c|comm|lockable)",
    "tally_op": r"\b(?:op|oldest|mark|made|engine_op_of\(\w+\))",
    "tly_peer": "",
    "tly_part": "",
}

# Struct: its owner's files, with their headers.
OWNERS = {
    "tly_active": "active.h op",
    "tly_blocks": "blocks",
    "tly_chain": "chain",
    "tly_completion": "events",
    "tly_completions": "events",
    "tly_dialling": "peer",
    "tly_epochs": "epoch follow",
    "tly_failure": "state comm.h",
    "tly_glances": "traffic",
    "tly_groups": "group",
    "tly_handle": "handle",
    "tly_inbox": "inbox",
    "tly_joining": "joining rounds",
    "tly_keeps": "keep",
    "tly_watched": "engine",
    "tly_leaving": "state comm.h",
    "tly_names": "names",
    "tly_origin": "state",
    "tly_pace": "pace",
    "tly_progress": "op",
    "tly_reports": "report",
    "tly_running": "comm",
    "tly_said": "chain",
    "tly_shard": "team",
    "tly_sharing": "engine local team",
    "tly_spec": "spec",
    "tly_spec_before": "spec",
    "tly_stagers": "stager",
    "tly_teams": "team",
    "tly_wait": "op",
    "tly_own_traffic": "traffic",
}

STRUCT = re.compile(r"^struct (\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)


def code(text):
    return COMMENT.sub("", text)


def fields_of(body):
    """[(type, name)] of a struct's body; an inner struct counts as one field."""
    found, before = [], None
    while before != body:
        before, body = body, re.sub(r"\{[^{}]*\}", "", body)
    for line in body.split(";"):
        line = re.sub(r"\[[^\]]*\]", "", line)
        if pointer := re.search(r"\(\*(\w+)\)", line):
            found.append(("function", pointer[1]))
            continue
        kind = " ".join(line.split(",")[0].split()[:-1])
        found += [(kind, re.findall(r"\w+", part)[-1]) for part in line.split(",") if part.strip()]
    return found


def structs_of(text):
    return {name: fields_of(body) for name, body in STRUCT.findall(code(text))}


def names_field(text, struct, field):
    """Does it name this field of a shared struct?"""
    return re.search(rf"{SHARED[struct]}(?:->|\.)\s*{field}\b|\bstruct {struct}, {field}\b", text) is not None


def is_owner(struct, name):
    """name: "names.c" or "names.h".  An owner without a suffix has both."""
    return any(name == owner or name.rsplit(".", 1)[0] == owner for owner in OWNERS[struct].split())


def trespasses(struct, holders, name, text):
    """Where a file that is no owner names a field of the struct.  holders: names of the fields that hold one."""
    found = [f"{name}: {hit}" for holder in holders for hit in re.findall(rf"(?:->|\.){holder}\.\w+", text)]
    for pointer in set(re.findall(rf"\bstruct {struct} \*(\w+)", text)):
        found += [f"{name}: {hit}" for hit in re.findall(rf"(?<![>.])\b{pointer}->\w+", text)]
    return found


def sources():
    paths = files("src/comm/*.c", "src/comm/*.h", "src/ops/*.c", "src/ops/*.h")
    return {path: code(path.read_text(encoding="utf-8")) for path in paths if not path.name.endswith("_test.c")}


SOURCES = sources()
STRUCTS = {
    name: fields for path, text in SOURCES.items() if path.suffix == ".h" for name, fields in structs_of(text).items()
}


@pytest.mark.parametrize("struct", MOST_FIELDS)
def test_shared_structs_have_few_fields(struct):
    assert len(STRUCTS[struct]) <= MOST_FIELDS[struct]


@pytest.mark.parametrize("struct", SHARED)
def test_a_field_is_named_in_several_files(struct):
    alone = set()
    for kind, field in STRUCTS[struct]:
        users = [path.name for path, text in SOURCES.items() if names_field(text, struct, field)]
        if len(users) < 2 and kind.removeprefix("struct ") not in OWNERS:
            alone.add(field)
    assert alone == set()


@pytest.mark.parametrize("struct", OWNERS)
def test_owners_alone_name_the_fields(struct):
    assert STRUCTS[struct]
    holders = {field for fields in STRUCTS.values() for kind, field in fields if kind == f"struct {struct}"}
    found = []
    for path, text in SOURCES.items():
        if not is_owner(struct, path.name):
            found += trespasses(struct, holders, path.name, text)
    assert found == []


def test_locks_are_in_structs_of_owners():
    for struct, fields in STRUCTS.items():
        if any(kind == "pthread_mutex_t" for kind, _ in fields):
            assert struct in OWNERS


def test_the_check_itself():
    text = (
        "struct a {\n    int x, y; /* z; */\n    struct tly_names names;\n    void (*f)(int);\n"
        "    struct {\n        int i;\n    } list[3];\n};\n"
    )
    fields = structs_of(text)["a"]
    assert [name for _, name in fields] == ["x", "y", "names", "f", "list"]
    assert fields[2][0] == "struct tly_names"
    assert names_field("c->x = 1;", "tally_comm", "x")
    assert names_field("tly_list_entry(n, struct tally_op, node)", "tally_op", "node")
    assert not names_field("c->xy = 1; x = 2; t->x = 3;", "tally_comm", "x")
    assert is_owner("tly_failure", "state.c")
    assert is_owner("tly_failure", "comm.h")
    assert not is_owner("tly_failure", "comm.c")
    assert trespasses("tly_names", {"names"}, "op.c", "c->names.lock = 1;") == ["op.c: ->names.lock"]
    text = "void f(struct tly_names *n)\n{\n    tly_names_lock(n);\n    n->joins++;\n}\n"
    assert trespasses("tly_names", {"names"}, "op.c", text) == ["op.c: n->joins"]
    assert trespasses("tly_names", {"names"}, "op.c", "tly_names_lock(&c->names);") == []
