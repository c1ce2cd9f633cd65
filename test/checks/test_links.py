"""What our binaries link and export: neither PyTorch nor Python is linked, so one build serves every version of
both, and the library exports the functions of tally.h and nothing else."""

import re
import subprocess
from collections import Counter

import pytest
from test_circles import COMMENT, DEFINED
from tree import BUILT, ROOT, files, public_functions

FOREIGN_LIBRARY = re.compile(r"lib(torch|c10|python|caffe2|shm)\b|libtorch|libc10|libpython")
# CPython's C API, and C++ symbols of the namespaces at, c10 and torch.
FOREIGN_SYMBOL = re.compile(r"_?Py[A-Z_]\w*|_ZNK?(2at|3c10|5torch)\w*")


def foreign_libraries(readelf):
    return [
        name for name in re.findall(r"\(NEEDED\)[^\[]*\[([^\]]+)\]", readelf) if FOREIGN_LIBRARY.match(name)
    ]


def foreign_symbols(nm):
    names = [line.split()[-1].split("@")[0] for line in nm.splitlines() if line.strip()]
    return [name for name in names if FOREIGN_SYMBOL.fullmatch(name)]


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def binaries():
    """Every executable and shared object of build/meson, links left out."""
    found = []
    for path in sorted(BUILT.rglob("*")):
        if path.is_file() and not path.is_symlink() and (path.stat().st_mode & 0o111 or ".so" in path.name):
            with open(path, "rb") as file:
                if file.read(4) == b"\x7fELF":
                    found.append(path)
    return found


def test_there_is_something_to_look_at():
    assert any(path.name.startswith("libtally.so") for path in binaries())


@pytest.mark.parametrize("path", binaries(), ids=lambda path: str(path.relative_to(BUILT)))
def test_links_neither_torch_nor_python(path):
    assert foreign_libraries(output("readelf", "-d", path)) == []
    assert foreign_symbols(output("nm", "-D", "--undefined-only", path)) == []


def test_library_exports_what_the_header_declares():
    symbols = output("nm", "-D", "--defined-only", "--format=posix", BUILT / "libtally.so").splitlines()
    # Linkers may put the version script's own name there, as an absolute symbol.
    exported = sorted(line.split()[0].split("@")[0] for line in symbols if line.split()[1] != "A")
    assert exported == public_functions()


def test_global_names_within_the_library_carry_its_prefix():
    for archive in ("libtallycore.a", "libtallyrank.a"):
        symbols = output("nm", "-g", "--defined-only", "--format=posix", BUILT / archive).splitlines()
        names = {line.split()[0] for line in symbols if len(line.split()) >= 2 and not line.endswith(":")}
        assert names, "nm shows no symbols"
        # Sanitizers and coverage add names that begin with underscores.
        assert [n for n in sorted(names) if not re.match(r"tly_|tally_|__", n)] == []


def defined(*path):
    """The names that a binary of build/meson defines, exported or not; GCC's clones carry the name of their function."""
    symbols = output("nm", "--defined-only", "--format=posix", BUILT.joinpath(*path)).splitlines()
    return {line.split()[0].split(".")[0] for line in symbols}


def shared_names(pattern):
    """The functions and tables that the sources of this pattern define."""
    return {symbol for path in files(pattern) if not path.name.endswith("_test.c")
            for symbol, _ in DEFINED.findall(COMMENT.sub("", path.read_text(encoding="utf-8")))}


def test_tallyd_links_nothing_of_a_rank():
    here = defined("src", "tallyd", "tallyd")
    assert here & shared_names("src/ops/*/service.c")
    for pattern in ("src/ops/*/rank.c", "src/ops/call.c", "src/comm/*.c", "src/local/*.c"):
        names = shared_names(pattern)
        assert names, pattern
        assert sorted(here & names) == [], pattern
    assert [name for name in here if name.startswith("tly_call_")] == []


COMMAND = ("cli",)


def called_by_some_alone(sources, some):
    """Shared functions and tables that only these files name, or files that only these call.  sources: {name: text}"""
    plain = {name: COMMENT.sub("", text) for name, text in sources.items()}
    some, alone, before = set(some), set(), None
    owner = {symbol: name for name, text in plain.items() if name.endswith(".c") for symbol, _ in DEFINED.findall(text)}
    users = {symbol: set() for symbol in owner}
    for name, text in plain.items():
        used = text if name.endswith(".c") else "".join(re.findall(r"^static inline.*?^}", text, re.MULTILINE | re.DOTALL))
        for symbol, count in Counter(re.findall(r"\btly_\w+", used)).items():
            if symbol in owner and count > (owner[symbol] == name):
                users[symbol].add(name)
    while alone != before:
        before = alone
        alone = {symbol for symbol in owner if users[symbol] and users[symbol] <= some}
        some |= {owner[symbol] for symbol in alone if {s for s in owner if owner[s] == owner[symbol]} <= alone}
    return alone


def test_what_the_command_alone_calls_is_linked_there_alone():
    sources = {
        str(path.relative_to(ROOT / "src")): path.read_text(encoding="utf-8")
        for path in files("src/*.c", "src/*.h")
        if not path.name.endswith("_test.c")
    }
    alone = called_by_some_alone(sources, {name for name in sources if name.startswith(COMMAND)})
    assert len(alone & defined("src", "cli", "tally")) > 50
    for binary in ("libtally.so",), ("src", "tallyd", "tallyd"):
        assert sorted(alone & defined(*binary)) == [], binary


def test_the_search_finds_what_it_is_for():
    sources = {
        "cli/a.c": "int tly_a(void)\n{\n    return tly_b() + tly_d();\n}\n",
        "x/b.c": "int tly_b(void)\n{\n    return tly_c();\n}\n",
        "x/c.c": "int tly_c(void)\n{\n    return 0;\n}\nint tly_d(void)\n{\n    return 1;\n}\nint tly_e(void)\n{\n    return tly_d();\n}\n",
        "x/c.h": "int tly_b(void);\nstatic inline int tly_f(void)\n{\n    return tly_e();\n}\n",
    }
    assert called_by_some_alone(sources, {"cli/a.c"}) == {"tly_b", "tly_c"}


def test_the_patterns_find_what_they_are_for():
    assert foreign_libraries(
        " 0x1 (NEEDED)  Shared library: [libpython3.11.so.1.0]\n (NEEDED) x: [libc.so.6]"
    ) == ["libpython3.11.so.1.0"]
    assert foreign_libraries("(NEEDED) x: [libtorch_cpu.so]\n(NEEDED) x: [libc10.so]") == [
        "libtorch_cpu.so",
        "libc10.so",
    ]
    assert foreign_symbols(
        "  U PyErr_SetString\n U _Py_Dealloc\n U _ZN3c104funcEv\n U poll\n U tally_op_poll"
    ) == ["PyErr_SetString", "_Py_Dealloc", "_ZN3c104funcEv"]
