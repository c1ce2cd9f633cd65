"""Faults one by one, on whole jobs over loopback: what README.md and docs/failures.md promise of each."""

import json
import os
import random
import re
import subprocess
import time

import pytest

from fault import GONE_OVER, SIZES, TALLY, Job, die_with_parent, share



def some(values, short):
    """All of the values, those beside `short` for the long run."""
    return [value if value in short else pytest.param(value, marks=pytest.mark.long) for value in values]


DAMAGE = some(["flip", "duplicate", "lose", "reorder", "truncate", "cut"], ["flip", "reorder", "cut"])
CHECKED = {"TALLY_CHECKSUM": "1"}


# --- nothing is wrong, or only slow --------------------------------------------------------------------


def test_undisturbed(tmp_path):
    with Job(tmp_path, words=["shuffle=1"]) as job:
        job.await_steps(10)
        for history in job.finish():
            assert set(history.epochs) == set(history.begun) and len(set(history.epochs.values())) == 1


def test_the_judge_sees_what_is_wrong(tmp_path):
    with Job(tmp_path, ranks=2, services=0) as job:
        job.await_steps(2)
        job.finish()
        path = tmp_path / "rank-1"
        good = path.read_text()
        changed = {
            "reference": re.sub(r"(end 1 0 0 )(.)", lambda m: m[1] + "0123456789abcdef"[int(m[2], 16) ^ 1], good),
            "ended twice": good + re.search(r".* end 1 0 .*\n", good)[0],
            "begun twice": good + re.search(r".* begin 1 0\n", good)[0],
            "epoch twice": good + re.search(r".* round 1 of 'tensor 0' .*\n", good)[0],
            "without having been begun": re.sub(r".* begin 1 0\n", "", good),
            "never ended": re.sub(r".* end 1 0 .*\n", "", good),
            r"before rank 1 had begun": re.sub(r"\d+( begin 1 0\n)", rf"{2**62}\1", good),
            "several epochs": re.sub(r"( round 1 of 'tensor 0' goes by split no\. )", r"\g<1>1", good),
            "without one": re.sub(r".* round 1 of 'tensor 0' .*\n", "", good),
            "changed": good + "1 touched 0 0\n",
        }
        for word, text in changed.items():
            assert text != good
            path.write_text(text)
            with pytest.raises(AssertionError, match=word):
                job.check()


@pytest.mark.parametrize("services", some([0, 1], [1]))
def test_opposite_orders_through_windows_of_one_part(tmp_path, services):
    env = {"TALLY_PART_BYTES": "65536", "TALLY_CREDIT_BYTES": "65536", "TALLY_WINDOW_PARTS": "1"}
    with Job(tmp_path, ranks=2, services=services, env=env, words=["shuffle=1"]) as job:
        job.await_steps(10)
        job.finish()


@pytest.mark.long
def test_a_slow_path_changes_no_bit(tmp_path):
    with Job(tmp_path, services=1, proxied=[0]) as job:
        job.await_steps(3)
        job.proxies[0][1].delay_s = 0.02
        job.await_steps(3)
        job.proxies[0][1].delay_s = 0
        job.proxies[0][2].rate = 2e6
        job.await_steps(3)
        job.proxies[0][2].rate = None
        job.await_steps(3)
        job.finish()


@pytest.mark.parametrize("kinds", [1, 2])
def test_every_kind_undisturbed(tmp_path, kinds):
    with Job(tmp_path, ranks=4, services=2, words=["shuffle=1", f"kinds={kinds}"]) as job:
        job.await_steps(5)
        job.finish()


@pytest.mark.parametrize("seed", some(range(6), [0, 1]))
@pytest.mark.parametrize("kinds", [1, 2])
def test_kills_in_the_middle_of_every_kind(tmp_path, kinds, seed):
    """Three tallyd die one after the other, each when a rank has so many bytes of its results in a step."""
    rnd = random.Random(f"{kinds} {seed}")
    env = {"TALLY_PART_BYTES": str(rnd.choice([16384, 65536])), "TALLY_FRAGMENT_BYTES": "4096"}
    with Job(tmp_path, ranks=4, services=3, seed=seed, env=env, words=["shuffle=1", f"kinds={kinds}"],
             proxied=[0, 1, 2]) as job:
        for number in rnd.sample(range(3), 3):
            job.await_steps(2)
            proxy, service = rnd.choice(job.proxies[number]), job.services[number]
            proxy.play("die", up=False, after=rnd.randrange(1, 100000), action=lambda service=service: job.kill(service))
            job.await_true(lambda service=service: not service.running(), "the end of a tallyd")
        job.await_steps(3)
        job.finish()


# --- ranks that run out of input -----------------------------------------------------------------------


UNEVEN = ["uneven=1", "pause_ms=2"]
# A quarter of SIZES, in parts of a quarter: as many parts, and a quarter of the bytes to sum and to check.
QUARTER, QUARTER_PARTS = [count // 4 or 1 for count in SIZES], {"TALLY_PART_BYTES": "16384"}


@pytest.mark.parametrize("seed", some(range(1, 13), [1, 2, 3]))
@pytest.mark.parametrize("what", ["kill", "cut", "join and drain", "evict", "nothing"])
def test_ranks_join_while_services_are_lost(tmp_path, what, seed):
    """By seeds: at any moment of a period some ranks have joined, and zeros stand for them, whoever sums."""
    rnd = random.Random(seed)
    pairs = {r: {"TALLY_HOST_ID": f"pair-{r // 2}"} for r in range(4)} if seed % 2 else None
    words = [*UNEVEN, "pause_ms=20"] if what == "evict" else UNEVEN  # it takes seconds, of which each step is checked
    with Job(tmp_path, 4, 2, seed, QUARTER, QUARTER_PARTS, words, rank_env=pairs, proxied=[0, 1, "rank-0"]) as job:
        for number in range(2):
            job.await_steps(rnd.randrange(1, 9))
            time.sleep(rnd.random() * 0.05)
            if what == "kill":
                job.kill(job.services[number])
            elif what == "cut":
                for proxy in job.all_proxies():
                    proxy.cut_all()
            elif what == "join and drain":
                job.add_service()
                job.drain(job.services[number])
            elif what == "evict" and number == 0:
                job.stop(job.services[0])
                time.sleep(5.5)
                job.resume(job.services[0])
        job.await_steps(8)
        job.finish()


@pytest.mark.parametrize("seed", some(range(1, 7), [1, 2]))
def test_ranks_join_while_the_coordinator_is_lost(tmp_path, seed):
    rnd = random.Random(seed)
    with Job(tmp_path, 3, 1, seed, words=UNEVEN, sizes=(30007, 5, 70001), coordinator=True) as job:
        for _ in range(2):
            job.await_steps(rnd.randrange(1, 9))
            job.kill(job.coordinator)
            time.sleep(rnd.random())
            job.start_coordinator()
            job.await_steps(8)
        job.finish()


def test_a_rank_that_has_joined_dies(tmp_path):
    seed = next(s for s in range(1, 1000) if share(s, 0, 2) == 1 and share(s, 0, 1) > 3)
    with Job(tmp_path, 3, 1, seed, words=UNEVEN, rank_words={1: ["late=1:4000"]}) as job:
        job.await_steps(1, ranks=[2])  # its only one
        time.sleep(0.5)
        job.kill(job.ranks[2])
        job.fail([0, 1], r"rank 2\b")


# --- late is not dead ----------------------------------------------------------------------------------


def test_a_late_rank_is_named_and_waited_for(tmp_path):
    with Job(tmp_path, rank_words={1: ["late=3:2500"]}, env={"TALLY_LATE_WARNING": "0.5"}) as job:
        job.await_steps(8)
        histories = job.finish()
        assert len(histories[0].steps) >= 8
        assert re.search(r"rank 1\b", job.ranks[0].output()), job.account()


@pytest.mark.parametrize("who", some(["service", "rank", "rank 0"], ["service", "rank 0"]))
def test_a_process_that_is_stopped_briefly_is_waited_for(tmp_path, who):
    with Job(tmp_path) as job:
        job.await_steps(3)
        process = {"service": job.services[0], "rank": job.ranks[2], "rank 0": job.ranks[0]}[who]
        job.stop(process)
        time.sleep(1)
        job.resume(process)
        job.await_steps(3)
        job.finish()


def evicted(job):
    """The coordinator, inside rank 0, has put a tallyd out."""
    return " is out: " in job.ranks[0].output()


@pytest.mark.parametrize("rank", some([0, 2], [2]))
def test_a_rank_that_stood_still_evicts_nobody(tmp_path, rank):
    """For longer than a tallyd may leave it without an answer."""
    with Job(tmp_path) as job:
        job.await_steps(3)
        job.stop(job.ranks[rank])
        time.sleep(3)
        job.resume(job.ranks[rank])
        job.await_steps(5)
        job.finish()
        assert not evicted(job), job.account()


def test_a_rank_that_stood_still_has_no_slow_card(tmp_path):
    """Its pauses are no samples of how fast the network is.  (The cards here are ten times faster than they are said to be.)"""
    with Job(tmp_path, ranks=2, services=0, sizes=(300007,) * 4, env={"TALLY_BANDWIDTH": "100M"}, words=()) as job:
        for _ in range(3):
            job.await_steps(4)
            job.stop(job.ranks[1])
            time.sleep(3)
            job.resume(job.ranks[1])
        job.await_steps(10)
        job.finish()
        assert "at best 80 s for 1 GB" in job.ranks[0].output(), job.account()
        assert "Gbit/s since" not in job.ranks[0].output(), job.account()


@pytest.mark.parametrize("where", [pytest.param("all cores", marks=pytest.mark.long(turn=4)), "the core of the tallyd"])
def test_a_hog_evicts_nobody(tmp_path, where):
    """Busy processes beside the job, several a core, for TALLY_TEST_HOG_S seconds: on the machine of all, or on that of the
    tallyd, whose judges then run without delay."""
    seconds, several = float(os.environ.get("TALLY_TEST_HOG_S", "6")), int(os.environ.get("TALLY_TEST_HOGS", "4"))
    cores = sorted(os.sched_getaffinity(0))
    hogged = cores if where == "all cores" else cores[:1]
    with Job(tmp_path, sizes=(30007, 1, 7001), words=["pause_ms=20"]) as job:
        job.await_steps(3)
        if hogged != cores:
            for service in job.services:
                for task in os.listdir(f"/proc/{service.popen.pid}/task"):
                    os.sched_setaffinity(int(task), hogged)
        hogs = [subprocess.Popen(["sh", "-c", "while :; do :; done"], preexec_fn=die_with_parent)
                for _ in range(several * len(hogged))]
        try:
            for hog in hogs:
                os.sched_setaffinity(hog.pid, hogged)
            time.sleep(seconds)
            job.await_steps(3)
        finally:
            for hog in hogs:
                hog.kill()
                hog.wait()
        job.finish()
        assert not evicted(job), job.account()
        assert [service.output().count("serving job") for service in job.services] == [1, 1], job.account()


def test_a_machine_that_sleeps_judges_nobody(tmp_path):
    """All is stopped for longer than a silent tallyd, or rank, may be."""
    with Job(tmp_path, env={"TALLY_DEAD_TIMEOUT": "2"}) as job:
        job.await_steps(3)
        everybody = job.services + job.ranks
        for process in everybody:
            job.stop(process)
        time.sleep(5.5)
        for process in everybody:
            job.resume(process)
        job.await_steps(3)
        job.finish()


# --- ranks ---------------------------------------------------------------------------------------------


def test_a_rank_that_is_killed_is_named_to_all(tmp_path):
    with Job(tmp_path, ranks=4) as job:
        job.await_steps(3)
        job.kill(job.ranks[2])
        job.fail([0, 1, 3], r"rank 2\b")


@pytest.mark.parametrize("rank", [1, 0])
def test_a_rank_that_stays_silent_is_named_to_all(tmp_path, rank):
    """Also the one with the coordinator, which then says nothing either."""
    with Job(tmp_path, env={"TALLY_DEAD_TIMEOUT": "2"}) as job:
        job.await_steps(3)
        job.stop(job.ranks[rank])
        job.fail([r for r in range(3) if r != rank], rf"rank {rank}\b", same=rank > 0)


def test_the_rank_with_the_coordinator_is_killed(tmp_path):
    with Job(tmp_path) as job:
        job.await_steps(3)
        job.kill(job.ranks[0])
        job.fail([1, 2], r"rank 0 on \S+, which holds the coordinator at \S+, has died", same=False)


@pytest.mark.long
def test_two_ranks_killed_at_once(tmp_path):
    with Job(tmp_path, ranks=4) as job:
        job.await_steps(3)
        job.kill(job.ranks[1])
        job.kill(job.ranks[3])
        job.fail([0, 2], r"rank [13]\b")


@pytest.mark.long
def test_a_rank_that_leaves_early_is_named_to_all(tmp_path):
    with Job(tmp_path, rank_words={1: ["leave=4"]}) as job:
        statuses = job.await_ends()
        job.check()
        assert statuses == [GONE_OVER, 0, GONE_OVER], job.account()
        for rank in 0, 2:
            assert re.search(r"rank 1 has left", job.histories()[rank].failed[1]), job.account()


def test_tallyd_serves_the_restarted_job(tmp_path):
    with Job(tmp_path) as job:
        job.await_steps(3)
        job.kill(job.ranks[1])
        job.fail([0, 2], r"rank 1\b")
        assert all(service.running() for service in job.services), job.account()
        job.restart()
        job.await_steps(3)
        job.finish()


# --- disagreement --------------------------------------------------------------------------------------


def status(job):
    address = job.where.environment("watcher")["TALLY_COORD"]
    done = subprocess.run([TALLY, "status", "--json", address], capture_output=True, text=True, timeout=60,
                          env=job.where.environment("watcher"))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_sizes_that_differ(tmp_path):
    """w[10M] on one rank, w[5M] on the other, parts of 1 MB, 4 services: both are told, the next round works."""
    sizes = (2_500_000, *SIZES[1:])
    with Job(tmp_path, ranks=2, services=2, sizes=sizes, env={"TALLY_PART_BYTES": "1M"}, words=["pause_ms=200"],
             rank_words={1: ["differ=1:0"]}) as job:
        job.await_steps(4)
        job.await_true(lambda: all(s["bytes_in_use"] == 0 for s in status(job)["services"]), "no memory in use")
        histories = job.finish()
        verdicts = {h.ends[1, 0] for h in histories}
        assert len(verdicts) == 1
        code, sentence = verdicts.pop()
        assert code == -22 and "tensor 0" in sentence and "2500000" in sentence and "1250000" in sentence
        assert all(h.ends[key][0] == 0 for h in histories for key in h.ends if key != (1, 0))


# --- a service ends ------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", some([0, 3], [3]))
def test_a_service_is_killed(tmp_path, steps):
    with Job(tmp_path, words=["shuffle=1", "pause_ms=5"]) as job:
        job.await_steps(1 + steps)
        job.kill(job.services[0])
        job.await_steps(10)
        assert all(len(set(h.epochs.values())) == 2 for h in job.finish()), job.account()


def test_two_services_are_killed_at_once(tmp_path):
    with Job(tmp_path, ranks=4, services=3) as job:
        job.await_steps(3)
        job.kill(job.services[0])
        job.kill(job.services[2])
        job.await_steps(10)
        job.finish()


@pytest.mark.long
def test_all_services_are_killed_one_after_another(tmp_path):
    with Job(tmp_path, services=3) as job:
        for service in job.services:
            job.await_steps(3)
            job.kill(service)
        job.await_steps(5)
        job.finish()


@pytest.mark.parametrize("ms", some([0, 1, 2, 5, 10, 20], [0, 5]))
def test_a_service_is_killed_during_the_change_that_another_caused(tmp_path, ms):
    with Job(tmp_path, services=2) as job:
        job.await_steps(3)
        job.kill(job.services[1])
        time.sleep(ms / 1000)
        job.kill(job.services[0])
        job.await_steps(5)
        job.finish()


@pytest.mark.parametrize("byte", some(range(64), [0, 33]))
def test_a_service_is_killed_after_a_byte_of_a_result(tmp_path, byte):
    with Job(tmp_path, ranks=2, services=1, proxied=[0]) as job:
        job.await_steps(3)
        trick = job.proxies[0][1].play("die", up=False, after=200_000 + byte, action=lambda: job.kill(job.services[0]))
        job.await_true(trick.done.is_set, "the byte")
        job.await_steps(5)
        job.finish()


def test_a_verdict_reaches_one_machine_and_then_the_service_dies(tmp_path):
    """All tensors differ in step 3; what one tallyd has to say of it reaches rank 0 alone."""
    with Job(tmp_path, ranks=2, services=1, proxied=[0], sizes=[1000] * 5, rank_words={1: ["differ=3:-1"]},
             words=["pause_ms=300"]) as job:
        job.await_true(lambda: job.steps(1) == 3, "three steps")
        job.proxies[0][1].hold(False)
        job.await_true(lambda: sum(key[0] == 3 for key in job.histories()[0].ends) == 5, "verdicts on rank 0")
        job.kill(job.services[0])
        job.proxies[0][1].pass_all()
        job.await_steps(3)
        histories = job.finish()
        for tensor in range(5):
            assert {h.ends[3, tensor] for h in histories} == {histories[0].ends[3, tensor]}
            assert histories[0].ends[3, tensor][0] == -22


def test_a_service_that_is_stopped_is_evicted_and_returns(tmp_path):
    with Job(tmp_path, services=2) as job:
        job.await_steps(3)
        job.stop(job.services[0])
        job.await_steps(5)  # no sooner than it is out
        assert re.search(r"is out: silent while rank \d waited for it", job.ranks[0].output()), job.account()
        job.resume(job.services[0])
        job.await_true(lambda: job.services[0].output().count("serving") == 2, "its return")
        said = job.services[0].output()
        assert re.search(r"stopped for \d+\.\d s .* and is out: joining again", said) and "died" not in said, said
        job.await_steps(2)
        check_split(job)
        job.await_steps(5)
        job.finish()


def test_all_services_are_stopped_at_once(tmp_path):
    """Most of those that sum are silent, to the coordinator as well: they are out, and no rank is taken for cut off."""
    with Job(tmp_path, ranks=2, services=3) as job:
        job.await_steps(3)
        for service in job.services:
            job.stop(service)
        job.await_steps(5)
        for service in job.services:
            job.resume(service)
        job.await_true(lambda: all(s.output().count("serving") == 2 for s in job.services), "their return")
        job.await_steps(5)
        job.finish()


@pytest.mark.long
def test_a_service_that_one_machine_cannot_reach_is_evicted(tmp_path):
    with Job(tmp_path, services=1, proxied=[0]) as job:
        job.await_steps(3)
        job.proxies[0][2].refuses = True
        job.proxies[0][2].cut_all()
        job.await_steps(5)
        job.finish()


# --- services come and go ------------------------------------------------------------------------------


def summed(job):
    """Bytes that each service that is there has summed so far, by its port."""
    return {s["port"]: s["bytes_summed"] for s in status(job)["services"]}


def check_split(job):
    """In the next steps those who are there sum, each its share of the optimum of n machines and k tallyd that are alike
    (give or take a part, which is 0.03 of a step); and nobody else."""
    tallyd = {s.port for s in job.services if s.running()}
    n, k = job.size, len(tallyd)
    whole = n * n + n * k - 2 * k
    share_of = {True: 2 * (n - 1) / whole, False: max(n - k, 0) / whole}
    before = summed(job)
    job.await_steps(20)
    gained = {port: now - before[port] for port, now in summed(job).items()}
    assert len(gained) == n + k and tallyd < set(gained), (gained, job.account())
    for port, gain in gained.items():
        share, part = share_of[port in tallyd], gain / sum(gained.values())
        assert abs(part - share) < 0.1 and (part > 0) == (share > 0), (port, share, gained, job.account())


def test_the_split_is_that_of_the_services_that_are_there(tmp_path):
    # Sums alone: what else there is goes through the workers' own services.
    with Job(tmp_path, services=2, sizes=(200003,) * 5) as job:
        job.await_steps(3)
        check_split(job)
        late = job.add_service()
        job.await_true(lambda: "serving" in late.output(), "the new tallyd's part in the job")
        job.await_steps(2)
        check_split(job)
        job.drain(job.services[0])
        job.await_ends([job.services[0]])
        check_split(job)
        job.kill(job.services[1])
        job.await_true(lambda: len(status(job)["services"]) == 4, "the change")
        job.await_steps(2)
        check_split(job)
        job.finish()


def test_a_service_joins_during_training(tmp_path):
    with Job(tmp_path, services=1) as job:
        job.await_steps(3)
        late = job.add_service()
        job.await_true(lambda: "serving" in late.output(), "the new tallyd's part in the job")
        job.await_steps(10)
        job.finish()


def test_a_service_joins_while_a_round_has_begun_on_one_machine_only(tmp_path):
    with Job(tmp_path, ranks=2, services=1, rank_words={1: ["late=3:6000"]}) as job:
        job.await_true(lambda: any(key[0] == 3 for key in job.histories()[0].begun), "a begun round")
        late = job.add_service()
        job.await_true(lambda: "serving" in late.output(), "the new tallyd's part in the job")
        assert job.steps(1) == 3
        job.await_steps(5)
        job.finish()


def drain_in_time(job, service):
    """It has promised to end within 20 s; some more are for the machine."""
    begin = time.monotonic()
    job.drain(service)
    assert job.await_ends([service]) == [0], job.account()
    assert time.monotonic() - begin < 20 + 10, job.account()


def test_a_service_drains(tmp_path):
    with Job(tmp_path) as job:
        job.await_steps(3)
        drain_in_time(job, job.services[0])
        job.await_steps(5)
        job.finish()


@pytest.mark.parametrize("late_s", [5, 35])
def test_a_service_drains_while_a_rank_is_late(tmp_path, late_s):
    """A round has begun there: its last push comes in time, or finds nobody, and it is summed elsewhere."""
    with Job(tmp_path, ranks=2, services=1, rank_words={1: [f"late=3:{late_s * 1000}"]}) as job:
        job.await_true(lambda: sum(key[0] == 3 for key in job.histories()[0].epochs) == len(SIZES), "a begun round")
        drain_in_time(job, job.services[0])
        assert job.steps(1) == 3 or late_s == 5, job.account()
        job.await_steps(5)
        histories = job.finish()
        epochs = {h.epochs[3, tensor] for h in histories for tensor in range(len(SIZES))}
        assert epochs == {histories[0].epochs[2, 0]}, "the round does not follow the service that leaves"


@pytest.mark.long
def test_one_joins_one_drains_and_one_dies(tmp_path):
    with Job(tmp_path, services=2) as job:
        job.await_steps(3)
        job.add_service()
        job.drain(job.services[0])
        job.kill(job.services[1])
        job.await_steps(20)
        job.finish()


@pytest.mark.long
def test_a_killed_service_comes_back_on_its_port(tmp_path):
    with Job(tmp_path, services=1) as job:
        job.await_steps(3)
        old = job.services[0]
        job.kill(old)
        job.await_steps(3)
        new = job.add_service(env={"TALLY_PORTS": f"{old.port}-{old.port}"})
        job.await_true(lambda: "serving" in new.output(), "the tallyd's part in the job")
        job.await_steps(5)
        job.finish()


# --- connections ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("up", [True, False], ids=["pushes", "results"])
def test_a_broken_connection_is_repaired_unseen(tmp_path, kind, up):
    with Job(tmp_path, services=1, proxied=[0], env=CHECKED) as job:
        job.await_steps(2)
        trick = job.proxies[0][1].play(kind, up, after=100_000 + 77)
        job.await_true(trick.done.is_set, "the damage")
        job.await_steps(5)
        job.finish()
        assert job.services[0].running(), job.services[0].output()


@pytest.mark.parametrize("byte", some(range(0, 64, 7), [7, 42]))
def test_a_connection_breaks_inside_a_block_of_a_push(tmp_path, byte):
    with Job(tmp_path, ranks=2, services=1, proxied=[0]) as job:
        for _ in range(4):
            job.await_steps(1)
            trick = job.proxies[0][1].play("truncate", up=True, after=50_000 + byte)
            job.await_true(trick.done.is_set, "the break")
        job.await_steps(3)
        job.finish()


def test_all_connections_break_again_and_again(tmp_path):
    with Job(tmp_path, services=1, proxied=[0]) as job:
        for _ in range(5):
            job.await_steps(1)
            for proxy in job.all_proxies():
                proxy.cut_all()
        job.await_steps(5)
        job.finish()


def test_a_connection_breaks_before_the_news_of_a_part_that_moved_is_read(tmp_path):
    """Rank 0 has results that rank 1 lacks when their tallyd dies.  What rank 0 says of them to their new service is lost
    with the connection; said again, it comes before anything that rank 1 says.  The service must wait for that."""
    with Job(tmp_path, ranks=2, services=1, sizes=[3000] * 16, proxied=[0, "rank-0", "rank-1"]) as job:
        job.await_steps(2)
        job.proxies[0][1].hold(False)
        step = job.steps(1)
        job.await_true(lambda: sum(key[0] >= step for key in job.histories()[0].begun) >= 16, "a step begun by rank 0")
        time.sleep(0.5)  # what can come to rank 0 has come
        to_own = [job.proxies[name][rank] for name in ("rank-0", "rank-1") for rank in (0, 1)]
        for proxy in to_own:
            proxy.hold(True)
        job.kill(job.services[0])
        job.proxies[0][1].cut_all()  # with what it held back
        job.proxies[0][1].pass_all()
        time.sleep(1)  # the change has been committed, and what is said of it stands at the gates
        for name in "rank-0", "rank-1":
            job.proxies[name][0].cut_all()
            job.proxies[name][0].pass_all()
        time.sleep(1)
        for proxy in to_own:
            proxy.pass_all()
        job.await_steps(5)
        job.finish()


# --- the coordinator -----------------------------------------------------------------------------------


def test_the_coordinators_death_does_not_stop_rounds(tmp_path):
    with Job(tmp_path, services=1, coordinator=True) as job:
        job.await_steps(3)
        job.kill(job.coordinator)
        job.await_steps(10)
        job.start_coordinator()
        job.await_steps(10)
        late = job.add_service()
        job.await_true(lambda: "serving" in late.output(), "the new tallyd's part in the job")
        job.await_steps(5)
        job.finish()


def test_a_service_dies_while_the_coordinator_is_away(tmp_path):
    """Nobody else can say who is to sum what it had: the rounds wait, and go on with the next coordinator."""
    with Job(tmp_path, services=2, coordinator=True) as job:
        job.await_steps(3)
        job.kill(job.coordinator)
        job.await_steps(3)
        job.kill(job.services[0])
        time.sleep(2)
        assert all(rank.running() for rank in job.ranks), job.account()
        job.start_coordinator()
        job.await_steps(10)
        job.finish()
