"""Each folder under src/ includes only what ARCHITECTURE.md allows it.

ARCHITECTURE.md has a table with one row a folder:

    | folder       | may include       | what it is        |
    |--------------|-------------------|-------------------|
    | src/base     | -                 | errors, log, …    |
    | src/plan     | base              | the optimal split |
    | src/comm     | base, plan, wire  | …                 |

First column: src/NAME, backticks and a trailing slash allowed.  src/NAME/* stands for the rooms of a folder, "NAME/*" in
the second column for their headers; src/NAME is then only what lies in the folder itself.  Second: names of folders under src/, separated
by commas or blanks, backticks allowed; "-" or "nothing" for none.  Further columns are free.  A folder may always
include itself and the public header tally/tally.h.  Unit tests (*_test.c) may include what they like: they stand
outside.  The table must cover every folder, name none that is not there, and have no cycles.

Within src/comm each file may use those before it in the list of src/comm/comm.h's opening comment:

     *   state.c, op.c   what they do
"""

import re

import pytest
from test_circles import COMMENT, sources_of, uses
from tree import ROOT, files


def parse_table(text):
    """{folder: set of folders that it may include}"""
    table = {}
    for line in text.splitlines():
        row = re.match(r"\s*\|\s*`?src/(\w+(?:/\*)?)/?`?\s*\|([^|]*)\|", line)
        if row:
            if row[1] in table:
                raise ValueError(f"ARCHITECTURE.md has src/{row[1]} twice")
            table[row[1]] = {w for w in re.findall(r"\w+(?:/\*)?", row[2].replace("src/", "")) if w != "nothing"}
    return table


def folder_of(parts):
    """The row of a file, by the parts of its path below src/."""
    folder, *rest = parts
    return f"{folder}/*" if len(rest) > 1 and folder in WITH_ROOMS else folder if rest else None


def violations(folder, allowed, sources):
    """sources: {name: text}.  Lines such as 'plan.c: "comm/op/op.h"'."""
    found = []
    for name, text in sources.items():
        for included in re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, flags=re.MULTILINE):
            if folder_of(included.split("/")) not in {folder, "tally", *allowed}:
                found.append(f'{name}: "{included}"')
    return found


def cycle(table):
    """A folder that reaches itself, or None."""
    for start in table:
        seen, todo = set(), list(table[start])
        while todo:
            folder = todo.pop()
            if folder == start:
                return start
            if folder not in seen:
                seen.add(folder)
                todo += table.get(folder, ())
    return None


def the_table():
    path = ROOT / "ARCHITECTURE.md"
    return parse_table(path.read_text(encoding="utf-8")) if path.exists() else {}


# Folders whose rooms include what the folder itself may not.
WITH_ROOMS = {"ops"}

SOURCES = [path for path in files("src/*.c", "src/*.h") if not path.name.endswith("_test.c")]
FOLDERS = sorted({folder_of(path.relative_to(ROOT / "src").parts) for path in SOURCES})


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_includes_only_what_it_may(folder):
    table = the_table()
    assert folder in table, f"ARCHITECTURE.md's table has no row for src/{folder}"
    sources = {
        str(p.relative_to(ROOT)): p.read_text(encoding="utf-8")
        for p in SOURCES
        if folder_of(p.relative_to(ROOT / "src").parts) == folder
    }
    assert violations(folder, table[folder], sources) == []


def test_the_inside_takes_nothing_of_the_machine_but_the_struct():
    included = set()
    for path in files("src/inside/*"):
        if path.suffix in (".c", ".h") and not path.name.endswith("_test.c"):
            text = path.read_text(encoding="utf-8")
            included |= set(re.findall(r'#\s*include\s+"(machine/[^"]+)"', text))
            calls = re.findall(r"^(?! \*|/\*).*\btly_machine_\w+\(", text, flags=re.MULTILINE)
            assert calls == [], path
    assert included == {"machine/machine.h"}


def test_table_names_only_folders_that_are_there():
    table = the_table()
    assert table, "ARCHITECTURE.md has no table of folders"
    assert sorted((set(table) | set().union(*table.values())) - set(FOLDERS)) == []


def test_table_has_no_cycles():
    assert cycle(the_table()) is None


# --- the files of a folder ---

MOST_HEADER_LINES = 250


def parse_order(text):
    """Files in the order of the list in a header's opening comment."""
    rows = re.findall(r"^ \*   ((?:[\w/]+\.c(?:, )?)+) ", text.split("*/")[0], flags=re.MULTILINE)
    return [name for row in rows for name in row.split(", ")]


def names_of(header):
    """What a header declares: functions, macros, constants, structs and their fields."""
    text = COMMENT.sub("", header)
    names = set(re.findall(r"\b(tly_\w+)\(|#define (\w+)", text)) | set(re.findall(r"()\b(tly_\w+)[,;]", text))
    found = {name for pair in names for name in pair if name}
    for tag, body in re.findall(r"^(?:struct|enum)(?: (\w+))? \{(.*?)\}", text, flags=re.MULTILINE | re.DOTALL):
        found |= {tag, *re.findall(r"(\w+)\s*(?=[;,\[=)]|$)", body)}
    return found - {""}


def unused(name, text, headers, folder="comm"):
    """Headers of its folder that the file includes and uses nothing of."""
    words = set(re.findall(r"\b\w+\b", re.sub(r"^\s*#\s*include.*$", "", COMMENT.sub("", text), flags=re.MULTILINE)))
    included = re.findall(rf'#include "{folder}/(?:\w+/)?(\w+\.h)"', text)
    return [f"{name}: {header}" for header in included if not words & names_of(headers[header])]


def changes_state(text):
    """Does this assign to a field `state`?  Not where a whole struct is made ("{.state = …")."""
    return bool(re.search(r"(->|[\w\])]\.)state\s*(\|\||[-+*/|&^]|<<|>>)?=(?!=)", COMMENT.sub("", text)))


def headers_of(folder):
    return {path.name: path.read_text(encoding="utf-8") for path in files(f"src/{folder}/*.h")}


def test_files_of_comm_use_those_before_them():
    order = parse_order((ROOT / "src/comm/comm.h").read_text(encoding="utf-8"))
    graph = uses(sources_of("comm"))
    assert sorted(order) == sorted(graph)
    place = {name: i for i, name in enumerate(order)}
    assert [f"{name} uses {other}" for name in order for other in graph[name] if place[other] > place[name]] == []


@pytest.mark.parametrize("folder", ["comm", "membership", "sched", "sum"])
def test_files_include_only_what_they_use(folder):
    headers = headers_of(folder)
    assert [line for name, text in sources_of(folder).items() for line in unused(name, text, headers, folder)] == []


def test_parts_change_their_state_in_one_function():
    changes = [name for name, text in sources_of("comm").items() if changes_state(text)]
    assert changes == ["op/part.c"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_headers_are_short(folder):
    for name, text in headers_of(folder).items():
        assert len(text.splitlines()) <= MOST_HEADER_LINES, name


def test_headers_of_comm_say_who_owns_what():
    for name, text in headers_of("comm").items():
        opening = text.split("*/")[0]
        assert re.search(r"[Oo]wne|lock|[Tt]hread|Pure functions", opening), name


def test_the_check_of_files_itself():
    text = "/* x.h - in x.c.\n *\n *   a.c, b.c   one and two\n *   c.c        three, as d.c\n */\n *   e.c  no\n"
    assert parse_order(text) == ["a.c", "b.c", "c.c"]
    headers = {"a.h": "struct a {\n    int far; /* near */\n};\nint tly_a(void);\n", "b.h": "int tly_b(void);\n"}
    source = '#include "comm/a.h"\n#include "comm/b.h"\nint near(void)\n{\n    return x->far;\n}\n'
    assert unused("c.c", source, headers) == ["c.c: b.h"]
    for text in ("p->state = 1;", "op->parts[i].state = 1;", "part.state |= 2;", "tly_part(p)->state=1;"):
        assert changes_state(text)
    for text in ("if (p->state == 1)", "x = (struct part){.state = 1};", "/* p->state = 1 */", "int state = 1;"):
        assert not changes_state(text)


def test_the_check_itself():
    table = parse_table(
        "| folder | may include |\n|---|---|\n| `src/base/` | - | x |\n| src/plan | `base`, wire |\n| src/wire | nothing |\n"
    )
    assert table == {"base": set(), "plan": {"base", "wire"}, "wire": set()}
    source = {
        "plan.c": '#include "plan/plan.h"\n#include "base/log.h"\n#include "tally/tally.h"\n#include <comm/x.h>\n# include "comm/op/op.h"\n#include "near.h"\n'
    }
    assert violations("plan", {"base"}, source) == ['plan.c: "comm/op/op.h"', 'plan.c: "near.h"']
    assert cycle(table) is None
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) in ("b", "c")
    with pytest.raises(ValueError):
        parse_table("| src/base | - |\n| src/base | - |")


def test_the_map_stays_short():
    """What one room alone must know is said in that room."""
    size = (ROOT / "ARCHITECTURE.md").stat().st_size
    assert size <= 15 << 10, f"ARCHITECTURE.md has {size} bytes, and at most 15 KB are read: move a section into its room"
