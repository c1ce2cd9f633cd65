"""What the checks look at: the files of the source tree and of build/meson."""

import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "meson"


def files(*patterns):
    """Files of the source tree that match any of the globs: those that git has or would take."""
    out = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [
        path for path in map(ROOT.joinpath, sorted(filter(None, out.stdout.split("\0")))) if path.is_file()
    ]


def public_functions():
    """The functions that include/tally/tally.h declares."""
    text = re.sub(
        r"/\*.*?\*/", "", (ROOT / "include/tally/tally.h").read_text(encoding="utf-8"), flags=re.DOTALL
    )
    return sorted(re.findall(r"TALLY_API\b[^;{]*?\b(tally_\w+)\s*\(", text))


def parameters():
    """The names in the table of src/base/param.h, but for those that param.c hides: they are for tests."""
    table = (ROOT / "src/base/param.h").read_text(encoding="utf-8")
    hidden = re.findall(r'"(TALLY_\w+)", \.hidden', (ROOT / "src/base/param.c").read_text(encoding="utf-8"))
    return [name for name in re.findall(r"^\s*X\((TALLY_\w+),", table, flags=re.MULTILINE) if name not in hidden]
