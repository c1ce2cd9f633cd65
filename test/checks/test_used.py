"""What files share is called: a function that only tests call belongs to the tests."""

import re
from collections import Counter

from test_circles import COMMENT, DEFINED
from tree import files

# Parts of contracts that nothing in src/ calls yet.  This list may only shrink.
CALLED_BY_TESTS_ALONE = {
    "tly_call_register": "a test adds an operation without a line of src/",
    "tly_rule_register": "and a rule",
    "tly_stage_register": "and a stage",
    "tly_memory_announce": "for a medium that must register memory (RDMA)",
    "tly_reduce_variant": "benchmarks and failed tests name the variant",
}

DECLARED = re.compile(r"^[A-Za-z_][\w \*]*?\b(tly_\w+)\([^;{}]*\)[^;{}()]*(?:\(\([^;{}]*\)\))?;", re.MULTILINE)


def uncalled(sources):
    """Shared functions that no other place names but the declaration.  sources: {name: text}"""
    plain = {name: COMMENT.sub("", text) for name, text in sources.items()}
    owner = {symbol: name for name, text in plain.items() for symbol, rest in DEFINED.findall(text) if rest != "="}
    uses = Counter(dict.fromkeys(owner, -1))  # the definition
    for name, text in plain.items():
        uses.update(word for word in re.findall(r"\btly_\w+", text) if word in owner)
        uses.subtract(symbol for symbol in DECLARED.findall(text) if symbol in owner and name.endswith(".h"))
    return {symbol for symbol, count in uses.items() if count <= 0}


def test_shared_functions_are_called():
    sources = {
        str(path): path.read_text(encoding="utf-8")
        for path in files("src/*.c", "src/*.h")
        if not path.name.endswith("_test.c")
    }
    assert uncalled(sources) == set(CALLED_BY_TESTS_ALONE)


def test_the_check_itself():
    sources = {
        "a.h": "int tly_a(int x);\nvoid tly_b(void)\n    __attribute__((cold));\nint tly_c(void);\n",
        "a.c": "int tly_a(int x)\n{\n    return x;\n}\nvoid tly_b(void)\n{\n}\n/* tly_b() */\nint tly_c(void)\n{\n    return 1;\n}\n",
        "b.c": "static int x(void)\n{\n    return tly_a(1);\n}\nconst struct t tly_d = {tly_c};\n",
    }
    assert uncalled(sources) == {"tly_b"}
