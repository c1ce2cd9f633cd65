"""SPIN on recovery.pml, window.pml, change.pml, blocks.pml and shared.pml: every interleaving of small jobs with faults in them, and proof that the
models would notice."""

import os
import pathlib
import re
import shutil
import subprocess

import pytest

MODEL = pathlib.Path(__file__).resolve().with_name("recovery.pml")
WINDOW = MODEL.with_name("window.pml")
CHANGE = MODEL.with_name("change.pml")
BLOCKS = MODEL.with_name("blocks.pml")
SHARED = MODEL.with_name("shared.pml")
COMPILER = shutil.which("cc") or shutil.which("gcc")
CACHE = ["ccache"] if shutil.which("ccache") else []  # to compile takes longer than most searches

pytestmark = pytest.mark.skipif(not (shutil.which("spin") and COMPILER), reason="no spin, or no compiler for what it makes")

# Two machines, three services, two rounds, parts of two blocks, unless it says otherwise.
SOUND = {
    "undisturbed": "KILLS=0",
    "two services die": "L=1 KILLS=2",
    "one dies, a connection breaks": "ROUNDS=1 KILLS=1 BREAKS=1",
    "one dies, a connection breaks, over two rounds": "L=1 KILLS=1 BREAKS=1",
    "two connections break": "KILLS=0 BREAKS=2",
    "one is evicted while it lives, one joins, one drains": "L=1 KILLS=0 SUSPECTS=1 JOINS=1",
    "no room for copies": "KILLS=1 POOL=0",
    "three blocks": "ROUNDS=1 L=3 KILLS=2",
    "three machines": "MACHINES=3 ROUNDS=1 L=1 KILLS=1",
    "the coordinator dies between its COMMITs": "ROUNDS=1 L=1 KILLS=1 LOSSES=1",
    "the coordinator dies between its COMMITs, one joins": "L=1 KILLS=0 JOINS=1 LOSSES=1",
    "one has no more input": "KILLS=0 RESTS=1",
    "one has no more input, a service dies, a connection breaks": "ROUNDS=1 L=1 KILLS=1 BREAKS=1 RESTS=1",
    "one of three has no more input, a service dies": "MACHINES=3 ROUNDS=1 L=1 KILLS=1 RESTS=1",
    "all at once": "ROUNDS=1 L=1 KILLS=1 SUSPECTS=1 BREAKS=1 JOINS=1",
}
if os.environ.get("TALLY_CHAOS"):  # as `make chaos` does: minutes, gigabytes
    SOUND |= {
        "deep: two services die": "KILLS=2",
        "deep: one dies, a connection breaks": "KILLS=1 BREAKS=1",
        "deep: one is evicted, one joins, one drains": "KILLS=0 SUSPECTS=1 JOINS=1",
        "deep: one dies, one joins, one drains": "KILLS=1 JOINS=1",
        "deep: three machines, a connection breaks": "MACHINES=3 ROUNDS=1 KILLS=1 BREAKS=1",
        "deep: one dies, one joins, one drains, the coordinator dies": "L=1 KILLS=1 JOINS=1 LOSSES=1",
        "deep: one has no more input, two services die": "L=1 KILLS=2 RESTS=1",
        "deep: all at once": "ROUNDS=1 KILLS=1 SUSPECTS=1 BREAKS=1 JOINS=1",
    }

# They take more than 5 s each, and come out as before unless a model changes: CI has each in one of four commits.
LARGE = {
    "two services die",
    "two connections break",
    "one dies, a connection breaks, over two rounds",
    "one is evicted while it lives, one joins, one drains",
    "the coordinator dies between its COMMITs, one joins",
    "one has no more input, a service dies, a connection breaks",
    "one of three has no more input, a service dies",
    "all at once",
    "a shared part's service dies, a connection breaks",
    "a shared part of three ranks, its service dies",
    "a shared part moves there and back",
    "a shared part moves, all at once",
}


def in_turn(names):
    return [pytest.param(name, marks=pytest.mark.long(turn=4)) if name in LARGE else name for name in names]


# A rule that is dropped, the faults under which that shows, the assertion that must find it.
WRONG_SUM = r"frame_value==\(\(2\*r\)\+1\)"
LOST = r"frame_value==\(\(2\*r\)\+2\)"
NO_HOLDER = r"\(o==0\)\|\|\(b!=0\)"
TWICE = r"b==h\["
STUCK = r"st\[i\]==3"
BEGUN = r"st\[.*\]==0"
CUT = r"ep\[|cut_by\["
LEFT_BEHIND = r"phase\[i\]==0"
MUTANTS = {
    "NO_COPY": ("L=1 KILLS=1", LOST),
    "PUSH_RESULTS": ("ROUNDS=1 KILLS=1", WRONG_SUM),
    "DROP_EARLY": ("ROUNDS=1 KILLS=1", NO_HOLDER),
    "NO_UNION": ("KILLS=0 JOINS=1", f"{STUCK}|{CUT}"),
    "CUT_BY_NEWEST": ("KILLS=0 JOINS=1", CUT),
    "HAVE_BEFORE_COMMIT": ("KILLS=0 BREAKS=1", STUCK),
    "CLOSE_LATE": ("KILLS=0 SUSPECTS=1 ROUNDS=1", LEFT_BEHIND),
    "NOBODY_ASKED": ("KILLS=0 BREAKS=1", STUCK),
    "JUDGE_BY_OWNER": ("KILLS=2", LOST),
    "NOT_ASKED_AGAIN": ("ROUNDS=1 L=1 KILLS=1 JOINS=1 LOSSES=1", f"{STUCK}|{CUT}"),
    "SERVICE_FIRST": ("ROUNDS=1 KILLS=1 BREAKS=1", TWICE),
    "JOINED_TAKES_PART_IN_NOTHING": ("L=1 KILLS=1 RESTS=1", BEGUN),
    "JOINED_SAID_ONCE": ("ROUNDS=1 L=1 KILLS=0 BREAKS=1 RESTS=1", STUCK),
    "JOINED_IS_AWAITED": ("ROUNDS=1 L=1 KILLS=0 RESTS=1", STUCK),
}


# For a search that takes longer than the compiler.
FAST = ("-O1", "-DCOLLAPSE", "-DMEMLIM=8000")

# The same of window.pml (two ranks, four parts), of change.pml (two ranks, two rounds, two new splits, one eviction), of
# blocks.pml (two carriers, two operations, three parts) and of shared.pml (two ranks, two services, two additions a rank).
SMALL = {
    "the window stays": (WINDOW, "CHANGES=0"),
    "the window changes": (WINDOW, "CHANGES=2"),
    "the window changes, connections break": (WINDOW, "CHANGES=2 BREAKS=1"),
    "the window changes again and again, connections break": (WINDOW, "CHANGES=3 BREAKS=2"),
    "the split changes": (CHANGE, "REPLANS=3 EVICTIONS=0"),
    "the split changes, a service is evicted": (CHANGE, "REPLANS=2 EVICTIONS=1"),
    "a block for each operation": (BLOCKS, "BLOCKS=1 KILLS=0"),
    "a block for each operation, a service dies": (BLOCKS, "BLOCKS=1 KILLS=1"),
    "two blocks for each operation, two services die": (BLOCKS, "BLOCKS=2 KILLS=2"),
    "a shared part stays": (SHARED, "KILLS=0 BREAKS=1 BOUND=1 RESTS=1"),
    "a shared part's service dies, a connection breaks": (SHARED, "KILLS=1 BREAKS=1"),
    "a shared part's service dies, one has no more input": (SHARED, "KILLS=1 BOUND=1 RESTS=1"),
    "a shared part of three ranks, its service dies": (SHARED, "RANKS=3 ADDS=1 KILLS=1 BOUND=1 RESTS=1"),
    "a shared part's service dies, additions are taken back": (SHARED, "KILLS=1 SKIPS=1 BOUND=1"),
    "a shared part's service dies, a rank leaves, a COMMIT moves nothing": (SHARED, "ADDS=1 KILLS=1 LEAVES=1 STAYS=1"),
    "a shared part moves there and back": (SHARED, "ADDS=1 KILLS=0 MOVES=2"),
    "a shared part moves, all at once": (SHARED, "ADDS=1 KILLS=1 MOVES=1 BREAKS=1 BOUND=1 RESTS=1"),
}
if os.environ.get("TALLY_CHAOS"):
    SMALL |= {
        "deep: a shared part moves there and back": (SHARED, "KILLS=0 MOVES=2"),
        "deep: a shared part moves there and back, its service dies": (SHARED, "ADDS=1 KILLS=1 MOVES=2"),
        "deep: a shared part moves there and back, a connection breaks": (SHARED, "ADDS=1 KILLS=0 MOVES=2 BREAKS=1"),
    }
COMPLETE = {
    "the window changes again and again, connections break",
    "the split changes, a service is evicted",
    "a block for each operation, a service dies",
    "a shared part moves, all at once",
}
BEYOND = r"came\[r\]<=granted\[r\]"
OPEN = r"closed\["
MANY = r"alive<="
TAKEN_TWICE = r"!\(\(w\["
NOT_ENDED = r"flight\[i\]==0"
VALUES_LOST = r"^\(\(w\[target\]"
NEVER_BACK = r"\(values&cw\["
UNKNOWN = r"\(state\[s\]!=0\)"
TOO_FAR = r"\+1\)>=\("
SMALL_MUTANTS = {
    "KEEP_GRANTING": (WINDOW, "CHANGES=1", "<=window"),
    "REVOKE": (WINDOW, "CHANGES=1", BEYOND),
    "LET_WAIT": (WINDOW, "CHANGES=1", r"state\[i\]==4"),
    "BEGIN_AT_NEWEST": (WINDOW, "CHANGES=1 BREAKS=1", BEYOND),
    "ANY_ANSWER": (CHANGE, "REPLANS=1 EVICTIONS=1", OPEN),
    "NOT_PREPARED_ANEW": (CHANGE, "REPLANS=1 EVICTIONS=1", OPEN),
    "EVICTION_FORGETS_THE_PLAN": (CHANGE, "REPLANS=1 EVICTIONS=1", r"value\["),
    "BEGIN_WHILE_PREPARED": (CHANGE, "REPLANS=1 EVICTIONS=0", CUT),
    "NO_LIMIT": (CHANGE, "REPLANS=2 EVICTIONS=0", MANY),
    "OLD_REPORTS": (CHANGE, "REPLANS=2 EVICTIONS=0", MANY),
    "ONE_POOL": (BLOCKS, "BLOCKS=1 KILLS=0", r"state\[i\]==4"),
    "FREE_WHEN_ANSWERED": (BLOCKS, "BLOCKS=1 KILLS=1", "used<=1"),
    "APPLIED_AGAIN": (SHARED, "ADDS=1 KILLS=0 BREAKS=1", TAKEN_TWICE),
    "NUMBERS_ARE_GUESSED": (SHARED, "ADDS=1 KILLS=1", TAKEN_TWICE),
    "ANY_HOLDER": (SHARED, "KILLS=1", NEVER_BACK),
    "SOME_HAVE_SAID": (SHARED, "ADDS=1 KILLS=1", VALUES_LOST),
    "KEPT_WHILE_IN_FLIGHT": (SHARED, "ADDS=1 KILLS=1", NOT_ENDED),
    "LANDED_FROM_THE_OLD_OWNER": (SHARED, "ADDS=1 KILLS=0 MOVES=1", VALUES_LOST),
    "LANDED_FROM_BEFORE": (SHARED, "ADDS=1 KILLS=0 MOVES=2", VALUES_LOST),
    "OLD_WORDS": (SHARED, "ADDS=1 KILLS=0 MOVES=2 BREAKS=1", UNKNOWN),
    "OLD_STATE": (SHARED, "ADDS=1 KILLS=0 MOVES=2", r"state\[target\]==2"),
    "OLD_PUSHES": (SHARED, "KILLS=0 MOVES=2", r"due\["),
    "GIVEN_UP_BY_ONE": (SHARED, "ADDS=1 KILLS=0 MOVES=1", UNKNOWN),
    "NEXT_NUMBER_ONLY": (SHARED, "KILLS=0 SKIPS=1", NEVER_BACK),
    "CLOCKS_STAY": (SHARED, "KILLS=1 BOUND=1", TOO_FAR),
    "CREATE_ENDS_FOR_EACH_RANK": (SHARED, "ADDS=1 KILLS=1 LEAVES=1", NOT_ENDED),
    "ASKED_ONCE": (SHARED, "ADDS=1 KILLS=1 BREAKS=1", NOT_ENDED),
    "NOT_PUSHED_AGAIN": (SHARED, "KILLS=0 BREAKS=1", NOT_ENDED),
    "ANSWERED_AT_ONCE": (SHARED, "KILLS=0 BOUND=1", TOO_FAR),
    "JOINED_IS_AWAITED": (SHARED, "KILLS=0 BOUND=1 RESTS=1", NOT_ENDED),
}


def search(folder, settings, *flags, options=(), model=MODEL):
    """Every reachable state; the report of the search."""
    defines = [f"-D{setting}" for setting in settings.split()]
    subprocess.run(["spin", "-a", *defines, model], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*CACHE, COMPILER, "-w", "-DVECTORSZ=1024", *flags, "-c", "pan.c"], cwd=folder, check=True)
    subprocess.run([COMPILER, "-o", "pan", "pan.o"], cwd=folder, check=True)
    report = subprocess.run(["./pan", *options], cwd=folder, check=True, capture_output=True, text=True)
    text = report.stdout
    assert "max search depth too small" not in text and "out of memory" not in text, text
    return text


def unreached(report):
    """Steps of the model that never happen."""
    return re.findall(r"line|state \d+, \"(?!-end-)", report.partition("unreached")[2])


def trail(folder, settings, model=MODEL):
    """The shortest account of what went wrong: the frames, in order."""
    defines = [f"-D{setting}" for setting in settings.split()]
    command = ["spin", "-t", "-c", "-k", f"{model.name}.trail", *defines, model]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout


@pytest.mark.parametrize("name", in_turn(SOUND))
def test_nothing_goes_wrong(name, tmp_path):
    large = name in LARGE or name.startswith("deep")
    report = search(tmp_path, SOUND[name], "-DSAFETY", *(FAST if large else ()))
    assert "errors: 0" in report, report + trail(tmp_path, SOUND[name])
    if name == "all at once":
        # The model is not empty: every step of it happens.
        assert unreached(report) == [], report


def test_nothing_goes_round_for_ever(tmp_path):
    """No step is marked as progress, so any cycle at all would be found."""
    report = search(tmp_path, "ROUNDS=1 KILLS=1 BREAKS=1", "-DNP", "-DNOFAIR", options=["-l"])
    assert "errors: 0" in report and "non-progress cycles" in report, report


@pytest.mark.parametrize("name", in_turn(SMALL))
def test_windows_and_splits_change_and_nothing_goes_wrong(name, tmp_path):
    model, settings = SMALL[name]
    report = search(tmp_path, settings, "-DSAFETY", *(FAST if model == SHARED else ()), model=model)
    assert "errors: 0" in report, report + trail(tmp_path, settings, model)
    if name in COMPLETE:
        assert unreached(report) == [], report


@pytest.mark.parametrize("rule", SMALL_MUTANTS)
def test_a_dropped_rule_of_windows_and_splits_is_noticed(rule, tmp_path):
    model, settings, assertion = SMALL_MUTANTS[rule]
    report = search(tmp_path, f"{settings} MUTANT_{rule}", "-DSAFETY", model=model)
    found = re.search(r"assertion violated (.*)", report)
    assert found and re.search(assertion, found[1]), report


@pytest.mark.parametrize("rule", MUTANTS)
def test_a_dropped_rule_is_noticed(rule, tmp_path):
    settings, assertion = MUTANTS[rule]
    report = search(tmp_path, f"{settings} MUTANT_{rule}", "-DSAFETY")
    found = re.search(r"assertion violated (.*)", report)
    assert found and re.search(assertion, found[1]), report


def test_every_mutant_is_tried():
    assert set(LARGE) <= set(SOUND) | set(SMALL) and set(COMPLETE) <= set(SMALL)
    tried = {
        model: {rule for rule, (m, _, _) in SMALL_MUTANTS.items() if m == model}
        for model in (WINDOW, CHANGE, BLOCKS, SHARED)
    }
    for model, mutants in (tried | {MODEL: set(MUTANTS)}).items():
        assert set(re.findall(r"\bMUTANT_(\w+)", model.read_text(encoding="utf-8"))) == mutants
