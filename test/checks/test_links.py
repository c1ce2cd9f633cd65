"""What our binaries link and export: neither PyTorch nor Python is linked, so one build serves every version of
both, and the library exports the functions of tally.h and nothing else."""

import re
import subprocess

import pytest
from test_circles import COMMENT, DEFINED
from tree import BUILT, files, public_functions

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


@pytest.mark.parametrize("binary", (("libtally.so",), ("src", "tallyd", "tallyd")), ids="/".join)
def test_what_the_command_alone_calls_is_linked_there_alone(binary):
    here, command = defined(*binary), defined("src", "cli", "tally")
    for pattern in ("src/machine/*.c", "src/inside/*.c", "src/trace/merge.c", "src/trace/read.c"):
        names = shared_names(pattern)
        assert names & command, pattern
        assert sorted(here & names) == [], pattern


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
