"""Processes that die or pause at named moments of the protocol: scenario x moment x seed.  What a moment is stands in
src/base/fail.h; each result is compared with the reference, as in test_scenarios.py."""

import os
import random
import time

import pytest

from fault import Job

# The job's first COMMIT, which says "go", is not the one of a change; nor is its first INVITE.
RANKS, SERVICES = 3, 2
# `make chaos SEEDS=N` tries each moment with a twentieth of them.
MOST = max(5, int(os.environ.get("TALLY_CHAOS") or 0) // 20)
SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, MOST + 1))]


def some(values, short):
    """All of the values, those beside `short` for the long run."""
    return [value if value in short else pytest.param(value, marks=pytest.mark.long) for value in values]


def shape(moment, seed):
    """What a seed varies, and numbers of its own."""
    rnd = random.Random(f"{moment} {seed}")
    words = [f"shuffle={rnd.randrange(2)}", f"pause_ms={rnd.choice([0, 5])}"]
    env = {"TALLY_PART_BYTES": str(rnd.choice([16384, 65536])), "TALLY_FRAGMENT_BYTES": "4096"}
    return rnd, {"ranks": RANKS, "seed": seed, "words": words, "env": env}


def await_death(job, process):
    job.await_true(lambda: not process.running(), f"{process.name} comes to its moment")
    assert "fail point:" in process.output(), job.account()


def go_on(job):
    job.await_steps(5)
    job.finish()


# --- a tallyd ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("moment", some(
    ["begins PUSH", "gets PUSH", "has done PUSH", "sends RESULT", "has sent RESULT", "sends COUNTS"],
    ["begins PUSH", "has done PUSH", "has sent RESULT"]))
def test_a_service_dies(tmp_path, moment, seed):
    rnd, settings = shape(moment, seed)
    failing = {"tallyd-0": f"service {moment}:{rnd.randrange(1, 20 if 'COUNTS' in moment else 400)}:kill"}
    with Job(tmp_path, services=SERVICES, failing=failing, **settings) as job:
        await_death(job, job.services[0])
        go_on(job)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("moment", some(
    ["gets INVITE", "has done INVITE", "sends BEGUN", "has sent BEGUN", "gets COMMIT", "has done COMMIT"],
    ["gets INVITE", "has sent BEGUN", "gets COMMIT"]))
def test_a_guest_dies(tmp_path, moment, seed):
    _, settings = shape(moment, seed)
    with Job(tmp_path, services=1, failing={"tallyd-1": f"tallyd {moment}:1:kill"}, **settings) as job:
        job.await_steps(2)
        await_death(job, job.add_service())
        go_on(job)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("moment", some(["service gets HELLO", "service has sent HELLO"], ["service gets HELLO"]))
def test_a_guest_dies_while_it_is_met(tmp_path, moment, seed):
    rnd, settings = shape(moment, seed)
    failing = {"tallyd-1": f"{moment}:{rnd.randrange(1, RANKS + 1)}:kill"}
    with Job(tmp_path, services=1, failing=failing, **settings) as job:
        job.await_steps(2)
        await_death(job, job.add_service())
        go_on(job)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("moment", some(["gets COMMIT", "has done COMMIT"], ["gets COMMIT"]))
def test_a_service_dies_of_the_change_that_another_caused(tmp_path, moment, seed):
    _, settings = shape(moment, seed)
    with Job(tmp_path, services=SERVICES, failing={"tallyd-0": f"tallyd {moment}:2:kill"}, **settings) as job:
        job.await_steps(2)
        job.kill(job.services[1])
        await_death(job, job.services[0])
        go_on(job)


def test_a_service_that_is_out_when_the_job_ends_ends_too(tmp_path):
    """It is to serve one job alone.  When it comes again nobody is there who would tell it that this one is over."""
    _, settings = shape("out at the end", 1)
    failing = {"tallyd-0": "tallyd gets VERDICT:1:1500"}
    with Job(tmp_path, services=0, once=True, failing=failing, **settings) as job:
        service = job.add_service({"TALLY_DEAD_TIMEOUT": "3"})
        job.await_true(lambda: "serving" in service.output(), "its part in the job")
        job.stop(service)
        job.await_steps(5)  # no sooner than it is out
        job.resume(service)
        job.await_true(lambda: "fail point:" in service.output(), "word that it is out")
        job.finish()
        assert job.await_ends([service]) == [0] and "has ended without this tallyd" in service.output(), job.account()


# --- the coordinator, apart ----------------------------------------------------------------------------


def lose_coordinator(job, act):
    """It dies of what `act` begins; there is another; and services come as before."""
    job.await_steps(2)
    act(job)
    await_death(job, job.coordinator)
    job.failing.clear()
    job.start_coordinator()
    late = job.add_service()
    job.await_true(lambda: "serving" in late.output(), "the new tallyd's part in the job")
    go_on(job)


# How often the start comes to the moment, and how often the change does.
START = RANKS + SERVICES
REPLACED = {"sends PREPARE": (0, RANKS), "has sent PREPARE": (0, RANKS), "gets BEGUN": (START, RANKS),
            "has done BEGUN": (START, RANKS), "sends COMMIT": (START, START - 1), "has sent COMMIT": (START, START - 1)}
COMES = {"sends INVITE": (START, RANKS + 1), "has sent INVITE": (START, RANKS + 1), "gets BEGUN": (START, 2 * RANKS + 1),
         "has sent COMMIT": (START, START + 1)}


def pick(rnd, table, moment):
    before, times = table[moment]
    return {"coordinator": f"coordinator {moment}:{before + rnd.randrange(1, times + 1)}:kill"}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("moment", some(REPLACED, ["has sent PREPARE", "has done BEGUN", "sends COMMIT"]))
def test_the_coordinator_dies_while_a_service_is_replaced(tmp_path, moment, seed):
    rnd, settings = shape(moment, seed)
    with Job(tmp_path, services=SERVICES, coordinator=True, failing=pick(rnd, REPLACED, moment), **settings) as job:
        lose_coordinator(job, lambda job: job.kill(job.services[0]))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("moment", some(COMES, ["has sent INVITE"]))
def test_the_coordinator_dies_while_a_guest_comes(tmp_path, moment, seed):
    rnd, settings = shape(moment, seed)
    with Job(tmp_path, services=SERVICES, coordinator=True, failing=pick(rnd, COMES, moment), **settings) as job:
        lose_coordinator(job, lambda job: job.add_service())


@pytest.mark.parametrize("rank", range(RANKS))
def test_the_coordinator_dies_before_all_know_who_is_out(tmp_path, rank):
    """Two ranks prepare for it; the third lacks what the tallyd had given to them. They take up the tallyd again with the
    new coordinator, and lose it together."""
    _, settings = shape("out", rank)
    failing = {"coordinator": "coordinator has sent PREPARE:2:kill"}
    with Job(tmp_path, services=1, coordinator=True, proxied=[0], failing=failing, **settings) as job:
        job.await_steps(2)
        job.proxies[0][rank].hold(False)
        time.sleep(0.3)
        job.kill(job.services[0])
        await_death(job, job.coordinator)
        job.failing.clear()
        job.start_coordinator()
        go_on(job)


@pytest.mark.parametrize("times", range(1, RANKS))
def test_who_is_out_to_some_ranks_comes_back(tmp_path, times):
    """A tallyd that was silent for too long goes on, and the next coordinator has never heard that it was to go."""
    _, settings = shape("back", times)
    failing = {"coordinator": f"coordinator has sent PREPARE:{times}:kill"}
    with Job(tmp_path, services=1, coordinator=True, failing=failing, **settings) as job:
        job.await_steps(2)
        job.stop(job.services[0])
        await_death(job, job.coordinator)
        job.failing.clear()
        job.start_coordinator()
        job.resume(job.services[0])
        go_on(job)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_coordinator_dies_and_the_guest_that_it_invited(tmp_path, seed):
    """The new one hears first from a tallyd, which was told of no guest."""
    _, settings = shape("guest", seed)
    settings["words"] += ["pause_ms=20"]  # most steps are made while the test waits; each is compared
    failing = {"coordinator": f"coordinator has sent INVITE:{START + RANKS + 1}:kill"}
    with Job(tmp_path, services=SERVICES, coordinator=True, failing=failing, **settings) as job:
        job.await_steps(2)
        guest = job.add_service()
        await_death(job, job.coordinator)
        job.kill(guest)
        job.failing.clear()
        for rank in job.ranks:
            job.stop(rank)
        job.start_coordinator()
        time.sleep(1)
        for rank in job.ranks:
            job.resume(rank)
        job.await_true(lambda: "ranks of the running job are here" in job.coordinator.output(), "all ranks")
        time.sleep(4)  # a place that is nobody's would be looked for every 2 s
        go_on(job)


# --- a rank --------------------------------------------------------------------------------------------


CHANGE = ["gets PREPARE", "has done PREPARE", "has sent BEGUN", "gets COMMIT", "has done COMMIT", "sends HAVE", "has sent HAVE",
          "sends DONE", "has sent DONE", "gets AGAIN", "has done AGAIN"]


def times_before(moment):
    """A COMMIT and a BEGUN have been before the change."""
    return 1 + (moment.endswith("COMMIT") or moment.endswith("BEGUN"))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("moment", some(CHANGE, ["has sent BEGUN", "gets COMMIT", "has sent HAVE", "sends DONE"]))
def test_a_rank_pauses_in_a_change(tmp_path, moment, seed):
    """The others are ahead, and wait for what it says."""
    _, settings = shape(moment, seed)
    failing = {"rank-1": f"rank {moment}:{times_before(moment)}:400"}
    with Job(tmp_path, services=SERVICES, failing=failing, **settings) as job:
        job.await_steps(2)
        job.kill(job.services[0])
        go_on(job)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("moment", some(["gets PREPARE", "has sent BEGUN", "gets COMMIT", "has sent DONE"],
                                        ["has sent BEGUN", "has sent DONE"]))
def test_a_rank_dies_in_a_change(tmp_path, moment, seed):
    _, settings = shape(moment, seed)
    failing = {"rank-1": f"rank {moment}:{times_before(moment)}:kill"}
    with Job(tmp_path, services=SERVICES, failing=failing, **settings) as job:
        job.await_steps(2)
        job.kill(job.services[0])
        await_death(job, job.ranks[1])
        job.fail([0, 2], r"rank 1\b")


def test_the_rank_with_the_coordinator_dies_of_what_it_hears(tmp_path):
    """It dies once two others have been told; they hear what ended the job, not that they have lost the coordinator."""
    with Job(tmp_path, ranks=4, services=0, failing={"rank-0": "coordinator has sent VERDICT:2:kill"}) as job:
        job.await_steps(2)
        job.kill(job.ranks[2])
        await_death(job, job.ranks[0])
        job.fail([1, 3], r"rank 2\b")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("moment", some(["sends HAVE", "sends DONE", "gets AGAIN", "sends FINAL", "has sent FINAL"],
                                        ["sends DONE"]))
def test_another_service_dies_while_a_rank_speaks_of_the_first(tmp_path, moment, seed):
    """Rank 1 pauses there for as long as it takes until the second is gone; FINAL is for where one had more than the others,
    which may not be: then nobody pauses."""
    rnd, settings = shape(moment, seed)
    with Job(tmp_path, services=SERVICES, failing={"rank-1": f"rank {moment}:{rnd.randrange(1, 3)}:600"}, **settings) as job:
        job.await_steps(2)
        job.kill(job.services[0])
        job.await_true(lambda: "fail point:" in job.ranks[1].output() or job.steps(1) > 20, "the moment, if it comes")
        job.kill(job.services[1])
        go_on(job)
