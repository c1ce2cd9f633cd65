"""warm.py: programs run in the warm Python as in a new one."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import jobs
import warm

torch = pytest.importorskip("torch")

SAYS = """
    import json, os, random, sys
    import numpy, torch
    print(json.dumps({
        "arguments": sys.argv[1:], "name": __name__, "path": sys.path, "folder": os.getcwd(), "env": dict(os.environ),
        "cores": sorted(os.sched_getaffinity(0)), "stdin": sys.stdin.read(), "file": globals().get("__file__"),
        "main": sys.modules["__main__"].__dict__ is globals(), "threads": torch.get_num_threads(),
        "tasks": len(os.listdir("/proc/self/task")),
    }))
    print(random.random(), numpy.random.rand(), torch.initial_seed(), "tally" in sys.modules, file=sys.stderr)
"""


def run(command, **more):
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False,
                          **{"env": jobs.environment(), "input": "given", **more})


@pytest.fixture(name="script")
def _script(tmp_path):
    script = tmp_path / "says.py"
    script.write_text(textwrap.dedent(SAYS))
    return script


def test_as_a_new_interpreter(script, tmp_path):
    env = jobs.environment({"MORE": "1"})
    ran = [run([*python, script, "one", "two words"], env=env, cwd=tmp_path) for python in ([sys.executable], warm.python())]
    new, copy = [json.loads(done.stdout) for done in ran]
    assert copy == new
    assert copy["arguments"] == ["one", "two words"] and copy["main"] and copy["stdin"] == "given" and copy["env"]["MORE"] == "1"
    ran.append(run([*warm.python(), script]))
    drawn = [word for done in ran for word in done.stderr.split()[:3]]
    assert len(set(drawn)) == 9, "random numbers of a copy are those of another"
    assert all(done.stderr.split()[3] == "False" for done in ran), "the server has imported tally"


def test_a_line_of_code():
    code = textwrap.dedent(SAYS)
    new, copy = [json.loads(run([*python, "-c", code, "one"]).stdout) for python in ([sys.executable], warm.python())]
    assert copy == new


def test_how_it_ends():
    for code, status in (("pass", 0), ("raise SystemExit(7)", 7), ("1 / 0", 1), ("import os; os._exit(5)", 5),
                         ("import os; os.abort()", -signal.SIGABRT), ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL)):
        done = run([*warm.python(), "-c", code])
        assert done.returncode == status, (code, done)
    assert "ZeroDivisionError" in run([*warm.python(), "-c", "1 / 0"]).stderr
    assert run([*warm.python(), "-c", "import atexit; atexit.register(print, 'end')"]).stdout == "end\n"
    thread = "import threading, time; threading.Thread(target=lambda: print(time.sleep(0.1))).start()"
    assert run([*warm.python(), "-c", thread]).stdout == "None\n"
    kept = "import os, sys; sys.kept = type('Kept', (), {'__del__': lambda self, write=os.write: write(1, b'freed')})()"
    for setting, said in (({}, ""), ({"WHOLE_END": "1"}, "freed")):
        assert run([*warm.python(), "-c", kept], env=jobs.environment(setting)).stdout == said


def test_what_needs_a_new_interpreter(tmp_path):
    """Its imports are not there yet."""
    code = "import sys; print('torch' in sys.modules)"
    assert run([*warm.python(), "-c", code]).stdout == "True\n"
    assert run([*warm.python(), "-B", "-c", code]).stdout == "False\n"
    for setting in ({"OMP_NUM_THREADS": "2"}, {"LD_BIND_NOW": "1"}, {"TORCH_SHOW_CPP_STACKTRACES": "1"}):
        assert run([*warm.python(), "-c", code], env=jobs.environment(setting)).stdout == "False\n", setting


WAITS = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)"


def start():
    process = subprocess.Popen([*warm.python(), "-c", WAITS], env=jobs.environment(), stdout=subprocess.PIPE, text=True)
    return process, int(process.stdout.readline())


def is_alive(pid):
    try:
        os.kill(pid, 0)
        return True
    except ProcessLookupError:
        return False


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1))
def test_signals_reach_the_program(number):
    process, program = start()
    assert program != process.pid and is_alive(program)
    process.send_signal(number)
    assert process.wait(60) == -number
    process.stdout.close()
    while is_alive(program):
        time.sleep(0.01)


def test_the_client_ends_with_the_program():
    process, program = start()
    os.kill(program, signal.SIGSEGV)
    assert process.wait(60) == -signal.SIGSEGV
    process.stdout.close()
