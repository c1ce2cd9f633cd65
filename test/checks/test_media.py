"""Nothing outside src/transport/ names a medium: a new one touches its own folder and a line of media.c.

The media are those of the list in src/transport/media.c; each is named by its folder, its scheme and the names that reports
know.  A source names one by including its headers, calling its functions, or having such a name as a text of its own.
Exempt are the table of parameters (src/base/param.*), which has a switch for each, and unit tests.  What reports print they get from
tly_media_name().
"""

import re

from tree import ROOT, files

EXEMPT = {"src/base/param.c", "src/base/param.h"}


def media():
    """{name of the constant: folder}, as media.c lists them"""
    text = (ROOT / "src/transport/media.c").read_text(encoding="utf-8")
    return {f"tly_{folder}": folder for folder in re.findall(r"^ +MEDIUM\((\w+)\)", text, flags=re.MULTILINE)}


def names(folder):
    """What reports call the channels of a medium, and its scheme."""
    text = "".join(p.read_text(encoding="utf-8") for p in files(f"src/transport/{folder}/*.c"))
    listed = re.search(r"names\[\] = \{(.*?)\}", text, flags=re.DOTALL)[1]
    return set(re.findall(r'"(\w+)"', listed + re.search(r"\.scheme = (.*)", text)[1]))


def without_comments(text):
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def mentions(text, folders, words):
    """Lines of a source that name a medium."""
    either = "|".join(sorted(folders))
    text = without_comments(text)
    found = re.findall(rf'#\s*include\s+"transport/(?:{either})/[^"]*"', text)
    found += re.findall(rf"\b(?:tly|TLY)_(?:{either})(?:_\w+)?\b", text, flags=re.IGNORECASE)
    found += [f'"{w}"' for w in re.findall(r'"(\w+)"', text) if w in words]
    found += re.findall(rf"\bparams(?:\.|->)(?:{either})\b", text)
    return found


def test_nothing_outside_names_a_medium():
    folders = set(media().values())
    words = set().union(*map(names, folders)) - {"memory", "rdma"}  # words of other things, too; see below
    found = {}
    for path in files("src/*.c", "src/*.h"):
        name = str(path.relative_to(ROOT))
        if name.startswith("src/transport/") or name in EXEMPT or name.endswith("_test.c"):
            continue
        here = mentions(path.read_text(encoding="utf-8"), folders, words)
        if here:
            found[name] = here
    assert found == {}


def test_what_links_share_names_none():
    """In src/transport/ itself only media.c and the media's own folders do."""
    folders = set(media().values())
    own = {f"src/transport/{f}/" for f in folders}
    found = {}
    for path in files("src/transport/*.c", "src/transport/*.h"):
        name = str(path.relative_to(ROOT))
        if name == "src/transport/media.c" or name.endswith("_test.c") or any(map(name.startswith, own)):
            continue
        here = mentions(path.read_text(encoding="utf-8"), folders, set())
        if here:
            found[name] = here
    assert found == {}


def test_the_list():
    """A folder, which builds and defines the constant, and a line: nothing else has to know of a medium."""
    assert {"tly_shm", "tly_tcp"} <= set(media())
    assert names("shm") == {"memory", "shm"}
    assert names("tcp") == {"tcp"}
    for constant, folder in media().items():
        sources = "".join(p.read_text(encoding="utf-8") for p in files(f"src/transport/{folder}/*.c"))
        assert f"const struct tly_medium {constant} = {{" in sources
        assert (ROOT / "src/transport" / folder / "meson.build").is_file()
        assert not re.search(rf"\b{folder}\b", (ROOT / "src/transport/meson.build").read_text(encoding="utf-8"))


def test_the_check_itself():
    folders, words = {"tcp", "shm"}, {"tcp", "shm", "memory"}
    for source in (
        '#include "transport/tcp/tcp.h"\n',
        "err = tly_tcp_connect(&to, &fd);\n",
        "char name[TLY_SHM_NAME];\n",
        'if (strcmp(tly_link_medium(l), "shm") == 0)\n',
        "if (c->params.shm)\n",
        "if (!err && params->shm)\n",
    ):
        assert len(mentions(source, folders, words)) == 1, source
    for source in (
        '#include "transport/transport.h"\n#include "base/shared.h"\n',
        "/* over TCP: tly_tcp_connect() */ tly_link_dial(loop, &to, &c, &l);\n",
        "struct tcp_info info; tly_shared_create(1, false, &s);\n",
    ):
        assert mentions(source, folders, words) == [], source
