"""In these folders no file uses another one that uses it in turn, directly or by others: a file can be read, tested and
replaced with only what is below it.  One file uses another if it mentions a function that the other defines."""

import re

import pytest
from tree import ROOT, files

FOLDERS = ("transport", "wire")


def plain(text):
    """Without comments and strings."""
    return re.sub(r'"(\\.|[^"\\\n])*"', '""', re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))


def uses(sources):
    """{file: files that it uses}; sources: {file: text}."""
    texts = {name: plain(text) for name, text in sources.items()}
    defined = {
        function: name
        for name, text in texts.items()
        for function in re.findall(r"^(?!static\b)[a-z][\w \t*]*?\b(tly_\w+)\([^;{}]*\)\n\{", text, flags=re.MULTILINE)
    }
    return {
        name: {defined[w] for w in re.findall(r"\btly_\w+\b", text) if w in defined} - {name}
        for name, text in texts.items()
    }


def in_circles(graph):
    found = []
    for start in graph:
        seen, todo = set(), list(graph[start])
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo += graph[name]
        if start in seen:
            found.append(start)
    return sorted(found)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_circles(folder):
    sources = {
        str(p.relative_to(ROOT)): p.read_text(encoding="utf-8")
        for p in files(f"src/{folder}/*.c")
        if not p.name.endswith("_test.c")
    }
    assert in_circles(uses(sources)) == []


def test_the_check_itself():
    a = "int tly_a(int x)\n{\n    return tly_b(x);\n}\n"
    b = "struct s *tly_b(int x,\n            int y)\n{\n    return tly_c();\n}\n"
    c = 'static void tly_d(void)\n{\n}\nvoid tly_c(void)\n{\n    puts("tly_a"); /* tly_a() */\n}\n'
    graph = uses({"a.c": a, "b.c": b, "c.c": c})
    assert graph == {"a.c": {"b.c"}, "b.c": {"c.c"}, "c.c": set()}
    assert in_circles(graph) == []
    assert in_circles({**graph, "c.c": {"a.c"}}) == ["a.c", "b.c", "c.c"]
