"""A backtrace reads by itself: a static function carries its module's word, a shared struct tly_."""

import collections
import re

from tree import ROOT, files

MOST = 20  # names of static functions that several files of src/ have

STATIC = re.compile(r"^static\s[^;={}()]*?\b(\w+)\(", re.MULTILINE)
TAG = re.compile(r"^\s*(?:struct|union|enum) (\w+) \{", re.MULTILINE)


def static_functions(text):
    return {name for name in STATIC.findall(text) if not name.startswith("__")}


def sources(pattern):
    return [p for p in files(pattern) if not p.name.endswith("_test.c") and "neon" not in p.parts]


def test_few_files_share_the_name_of_a_static_function():
    found = collections.defaultdict(list)
    for path in sources("src/*.c"):
        for name in static_functions(path.read_text(encoding="utf-8")):
            found[name].append(str(path.relative_to(ROOT)))
    assert len(found) > 1000
    shared = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert len(shared) <= MOST, shared


def test_shared_structs_begin_with_tly():
    found = [
        f"{path.relative_to(ROOT)}: {tag}"
        for path in sources("src/*.h")
        for tag in TAG.findall(re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL))
        if not tag.startswith(("tly_", "tally_"))
    ]
    assert found == []


def test_a_tag_is_defined_once():
    found = collections.defaultdict(list)
    for path in [*sources("src/*.h"), *sources("src/*.c")]:
        for tag in set(TAG.findall(path.read_text(encoding="utf-8"))):
            found[tag].append(str(path.relative_to(ROOT)))
    assert {tag: paths for tag, paths in found.items() if len(paths) > 1} == {}


def test_the_pattern_finds_what_it_is_for():
    text = "static int a(void)\n{\n}\nstatic const struct x *b_c(int d)\n{\n}\nstatic int e = f(1);\nint g(void)\n"
    text += "static int h[] = {1};\nstatic void i(int x,\n              int y);\n#define J static int j(int)\n"
    assert static_functions(text) == {"a", "b_c", "i"}
