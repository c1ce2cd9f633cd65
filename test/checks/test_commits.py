"""The subjects of new commits are short enough to be read in one line."""

import subprocess

import pytest
from tree import ROOT

MOST_CHARACTERS = 72
# The rule is younger than the project: subjects up to this commit may be longer.
BEFORE_THE_RULE = "92d3b63a4768db65c6c71abbba563b212d45b13e"


def git(*arguments):
    return subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True)


def too_long(subjects):
    return [subject for subject in subjects if len(subject) > MOST_CHARACTERS]


def test_subjects_of_commits_are_short():
    if git("rev-parse", "--is-inside-work-tree").returncode != 0:
        pytest.skip("this is no git checkout")
    if git("merge-base", "--is-ancestor", BEFORE_THE_RULE, "HEAD").returncode != 0:
        pytest.skip("the history does not reach back to the commit from which on the rule holds")
    log = git("log", "--no-merges", "--format=%s", f"{BEFORE_THE_RULE}..HEAD")
    assert log.returncode == 0, log.stderr
    assert too_long(log.stdout.splitlines()) == []


def test_the_check_itself():
    assert too_long(["a" * 72, "a" * 73, ""]) == ["a" * 73]
