"""Jobs of several processes: how they end when something goes wrong, and over more than one node."""

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed.launcher import runner
from test_tp import TESTS, free_port, python_path

from dejavu_ds.launch import common

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the launcher is the same, processes share no GPU")

PROGRAM = str(TESTS / "run_failing.py")
MARK = "TEST_LAUNCH_MARK"


def launcher() -> list[str]:
    beside = Path(sys.executable).parent / "deepspeed"
    return [sys.executable, str(beside)] if beside.exists() else [shutil.which("deepspeed")]


def environment() -> dict[str, str]:
    """Of a job whose processes can be found again."""
    env = {**os.environ, "PYTHONPATH": python_path(), MARK: uuid.uuid4().hex, "OMP_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)
    return env


def processes_of(env: dict[str, str]) -> list[int]:
    """Ids of the processes of a job that have not ended."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if f"{MARK}={env[MARK]}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has ended meanwhile, or is another user's
            continue
    return found


def run_job(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    command = [*launcher(), *arguments]
    return subprocess.run(command, env=env or environment(), capture_output=True, text=True, timeout=200)


def run_job_on_a_terminal(*arguments: str, env: dict[str, str]) -> tuple[int, list[str]]:
    """(exit status, all lines that it writes, in the order in which they are seen)."""
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([*launcher(), *arguments], env=env, timeout=200, **out)
    return done.returncode, [line for line in done.stdout.splitlines() if line.strip()]


def spoken(done: subprocess.CompletedProcess) -> list[str]:
    """Lines on standard error that are not the launcher's log."""
    return [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("[20")]


def seconds_since_failure(lines: list[str]) -> float:
    """Of jobs that have just ended."""
    line = next(line for line in lines if line.startswith("failing at"))
    return time.time() - float(line.split()[-1])


FAILURES = {
    "raise": r"failing.py: error: KeyError: 'rank 1 lost its key' [rank 1]",
    "memory": "failing.py: error: out of memory: ",
    "kill": None,
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_rank_that_fails_ends_the_job_with_its_own_error(how):
    """The last line of all is the error, after the launcher's; where a rank could say nothing, nobody else misleads."""
    env = environment()
    status, lines = run_job_on_a_terminal("--num_gpus", "2", "--master_port", str(free_port()), PROGRAM, how, env=env)
    assert status != 0 and seconds_since_failure(lines) < 60
    if FAILURES[how] is None:
        assert "exits with return code = -9" in lines[-1]
        assert not any("error" in line for line in lines if not line.startswith("[20")), lines
    else:
        assert lines[-1].startswith(FAILURES[how]) and lines[-1].endswith("[rank 1]"), lines
        assert "exits with return code = 1" in lines[-2]
        assert not any("Connection" in line for line in lines)
    assert not processes_of(env)


@pytest.mark.parametrize("phase", ["running", "starting"])
def test_ctrl_c_leaves_no_process(phase):
    """A terminal sends the signal to every process of the job."""
    env = environment()
    command = [*launcher(), "--num_gpus", "2", "--master_port", str(free_port()), PROGRAM, "wait"]
    options = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    # A shell starts what runs in its background with the signal ignored, this test perhaps among it.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    job = subprocess.Popen(command, start_new_session=True, preexec_fn=heard, **options)
    awaited = "failing at" if phase == "running" else "spawned with command"
    try:
        assert any(awaited in line for line in job.stdout)
        os.killpg(job.pid, signal.SIGINT)
        assert job.wait(30) != 0
        deadline = time.monotonic() + 30
        while processes_of(env) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not processes_of(env)
    finally:
        for pid in processes_of(env):
            os.kill(pid, signal.SIGKILL)


def test_case_13_the_visible_gpus_are_the_ones_used(monkeypatch):
    """CUDA_VISIBLE_DEVICES=0,2 deepspeed launch/generate.py on a host of four, as docs/launching.md has it."""
    started = []

    class Started:
        returncode = 0

        def __init__(self, command, env):
            started.append((command, env.get("CUDA_VISIBLE_DEVICES")))

        def wait(self):
            return 0

    monkeypatch.setattr(runner.subprocess, "Popen", Started)
    monkeypatch.setattr(type(runner.get_accelerator()), "device_count", lambda self: 4)
    for options, gpus in (([], [0, 2]), (["--num_gpus", "2"], [0, 1]), (["--include", "localhost:1"], [1])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
        runner.main(["--hostfile", "/none", *options, "launch/generate.py"])
        command, visible = started.pop()
        world = next(argument for argument in command if argument.startswith("--world_info="))
        assert json.loads(base64.urlsafe_b64decode(world.partition("=")[2])) == {"localhost": gpus}
        assert visible is None  # launch.py sets it from the above


def test_errors_are_told_apart():
    lost = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")
    assert common._is_lost_connection(lost) and common._is_lost_connection(dist.DistBackendError("NCCL error"))
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert not common._is_lost_connection(full) and not common._is_lost_connection(ValueError("gloo"))
    assert common._is_out_of_memory(full) and common._is_out_of_memory(MemoryError())
    assert not common._is_out_of_memory(lost) and not common._is_out_of_memory(RuntimeError("shape"))


def node(number: int, hostfile: Path, port: int, *program: str, env=None) -> subprocess.CompletedProcess:
    """What is typed on one of two nodes."""
    options = ["--hostfile", str(hostfile), "--no_ssh", "--node_rank", str(number)]
    return run_job(*options, "--master_addr", "127.0.0.1", "--master_port", str(port), *program, env=env)


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hostfile"
    path.write_text("# two names of this host\nlocalhost slots=1\n127.0.0.1 slots=1\n")
    return path


def both(function) -> list:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, range(2)))


def test_two_nodes_without_ssh(hostfile):
    """Two launchers over loopback: one answer, on node 0 alone, and that of one process."""
    program = (str(TESTS.parent / "launch" / "generate.py"), "--max-new-tokens", "12", "--json")
    port = free_port()
    first, second = both(lambda number: node(number, hostfile, port, *program))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    alone = subprocess.run([sys.executable, *program], env=environment(), capture_output=True, text=True, timeout=200)
    together, one = (
        next(json.loads(line) for line in out.stdout.splitlines() if line.startswith('{"prompt"'))
        for out in (first, alone)
    )
    assert together["text"] == one["text"] != "" and (together["tp"], one["tp"]) == (2, 1)
    assert "The king" not in second.stdout


def test_a_rank_of_another_node_that_dies(hostfile):
    """No launcher knows of the other's ranks: the one that is left ends by itself and says so."""
    envs, port = [environment(), environment()], free_port()
    first, second = both(lambda number: node(number, hostfile, port, PROGRAM, "leave", env=envs[number]))
    assert first.returncode != 0 and second.returncode == 0 and seconds_since_failure(second.stdout.splitlines()) < 60
    assert "another rank is gone, its own output says why" in spoken(first)[-1]
    assert not processes_of(envs[0]) and not processes_of(envs[1])


@pytest.mark.parametrize("script", sorted(path.name for path in TESTS.glob("run_*.py")))
def test_ranks_leave_on_purpose(script):
    """A process that just ends while gloo's threads run is aborted now and then: each leaves its job, or at once."""
    text = (TESTS / script).read_text(encoding="utf-8")
    assert "leave_job()" in text or "os._exit(" in text
