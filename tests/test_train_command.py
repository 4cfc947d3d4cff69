"""`striped train` as a user runs it: real processes, real signals, real clusters of two processes."""

import json
import os
import pathlib
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from striped_attention import cli
from striped_attention.training.launch import GRACE, HEARTBEAT, in_cluster, reserved_port

TINY = shlex.split("--layers 1 --dim 16 --ffn 32 --heads 2 --kv-heads 1 --length 64 --batch 2 --dtype float32")
TINY += shlex.split("--schedule constant --warmup 0")  # so that the program does not depend on the number of steps
TINY += ["--data", __file__]
TWO = ("--cpu-devices", 2)
DEADLINE = 300  # timeout of a process in seconds; none should come close


STARTED = []


@pytest.fixture(autouse=True)
def _no_process_outlives_its_test():
    yield
    while STARTED:
        with STARTED.pop() as process:
            process.kill()


def start(*arguments, before=None, **environment):
    """Start `striped train` in a process, which first runs the code `before`."""
    code = f"import sys; {before}; from striped_attention.cli import main; sys.exit(main())"
    program = ("-m", "striped_attention.cli") if before is None else ("-c", code)
    process = subprocess.Popen(
        [sys.executable, *program, "train", *map(str, arguments)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    STARTED.append(process)
    return process


def finish(process):
    try:
        out, error = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, error


def run(*arguments, **environment):
    return finish(start(*arguments, **environment))


def steps_done(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def losses(folder):
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def wait_for(condition, process):
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def checkpoints(folder):
    return sorted(int(name) for name in os.listdir(folder) if name.isdecimal())


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Run of five steps by one process with two devices, saved after steps 2, 4 and 5; tests only read it."""
    folder = tmp_path_factory.mktemp("runs") / "alone"
    code, _, error = run(*TINY, *TWO, "--steps", 5, "--checkpoint-every", 2, "--keep", 3, "--checkpoint-dir", folder)
    assert code == 0, error
    assert checkpoints(folder) == [2, 4, 5]
    return folder


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_leaves_cleanly(tmp_path, number):
    process = start(*TINY, *TWO, "--steps", 100_000, "--checkpoint-dir", tmp_path)
    wait_for(lambda: len(steps_done(tmp_path)) >= 3, process)
    process.send_signal(number)
    code, out, error = finish(process)
    assert code == 0, error
    (last,) = checkpoints(tmp_path)
    assert f"{number.name}: stopping after this step. A second signal exits at once, without saving." in out
    assert f"{number.name}: stopped after step {last}." in out
    assert steps_done(tmp_path) == list(range(1, last + 1))


def test_a_process_killed_while_saving_loses_only_that_save(tmp_path):
    options = (*TINY, "--dim", 512, "--ffn", 2048, *TWO, "--checkpoint-every", 1)
    process = start(*options, "--steps", 100_000, "--checkpoint-dir", tmp_path)
    half_written = lambda: any("tmp" in name for name in os.listdir(tmp_path))  # noqa: E731

    def caught_while_saving():
        if len(checkpoints(tmp_path)) < 2 or not half_written():
            return False
        process.send_signal(signal.SIGSTOP)  # so that it cannot finish the save before it is killed
        if not half_written():
            process.send_signal(signal.SIGCONT)
        return half_written()

    wait_for(caught_while_saving, process)
    process.kill()
    finish(process)
    whole, before = checkpoints(tmp_path), losses(tmp_path)
    assert half_written()
    assert len(before) - whole[-1] <= 2, "only steps after the last complete save are lost"
    code, out, error = run(*options, "--steps", len(before) + 1, "--checkpoint-dir", tmp_path, "--resume")
    assert code == 0, error
    assert f"Resuming from step {whole[-1]}." in out
    assert steps_done(tmp_path) == list(range(1, len(before) + 2)), "every step is there exactly once"
    assert losses(tmp_path)[:-1] == before, "repeated steps are bit-identical"
    assert not half_written(), "the incomplete save was removed"


def test_two_processes_have_the_losses_of_one_and_stop_together(alone, tmp_path):
    """A signal to their parent reaches both, and a single process can resume from their checkpoint."""
    process = start(*TINY, "--local-processes", 2, "--cpu-devices", 1, "--steps", 100_000, "--checkpoint-dir", tmp_path)
    wait_for(lambda: len(steps_done(tmp_path)) >= 5, process)
    process.send_signal(signal.SIGTERM)
    code, out, error = finish(process)
    assert code == 0, error
    assert out.count("parameters,") == 1, "only one of them prints"
    assert "peer ranks" not in out, "messages of Gloo are suppressed"
    assert "stopped after step" in out
    (last,) = checkpoints(tmp_path)
    assert steps_done(tmp_path) == list(range(1, last + 1))
    assert losses(tmp_path)[:5] == pytest.approx(losses(alone), rel=1e-6)
    code, out, error = run(*TINY, *TWO, "--steps", last + 1, "--checkpoint-dir", tmp_path, "--resume")
    assert code == 0, f"one process resumes the checkpoint of two: {error}"
    assert f"Resuming from step {last}." in out
    assert steps_done(tmp_path) == list(range(1, last + 2))


def children(process):
    text = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    named = {int(pid): pathlib.Path(f"/proc/{pid}/cmdline").read_text() for pid in text}
    return [pid for pid, command in named.items() if "spawn_main" in command]


def test_when_one_local_process_dies_the_others_stop_with_a_message(tmp_path):
    process = start(*TINY, "--local-processes", 2, "--cpu-devices", 1, "--steps", 100_000, "--checkpoint-dir", tmp_path)
    wait_for(lambda: len(steps_done(tmp_path)) >= 2, process)
    os.kill(children(process)[1], signal.SIGKILL)
    code, _, error = finish(process)
    assert code == 1
    assert "process 1 was killed by SIGKILL; stopping the other 1." in error


@pytest.fixture
def cluster():
    """Starts two processes that find each other at an address, whose port stays reserved for the whole test."""
    with reserved_port() as port:
        where = ("--coordinator", f"127.0.0.1:{port}", "--num-processes", 2, "--process-id")
        common = (*TINY, "--cpu-devices", 1, "--steps", 100_000)
        yield lambda *own: [start(*common, *arguments, *where, i) for i, arguments in enumerate(own)]


def test_an_error_in_one_of_two_processes_ends_both(cluster, tmp_path):
    """Process 1 finds no data while process 0 waits for it; both must end without waiting for minutes."""
    good, bad = cluster((), ("--data", tmp_path / "nothing"))
    code, _, error = finish(bad)
    assert code == 2
    assert error.endswith("tokens as .npy or .bin.\n")
    code, _, error = finish(good)
    assert code != 0


@pytest.mark.parametrize("dead", [0, 1])
def test_when_a_process_of_a_cluster_dies_the_others_stop_with_a_message(cluster, tmp_path, dead):
    processes = cluster(*[("--checkpoint-dir", tmp_path)] * 2)
    wait_for(lambda: len(steps_done(tmp_path)) >= 2, processes[0])
    processes[dead].kill()
    code, _, error = finish(processes[1 - dead])
    finish(processes[dead])
    assert code != 0
    if dead == 1:
        assert error.splitlines()[-1].startswith("striped, process 0: another process is gone"), error
    else:  # JAX itself ends a process that lost process 0, with a long message before or after ours
        assert "another process is gone" in error or "another task died" in error
    assert "Traceback" not in error


def test_nobody_gets_the_port_that_was_reserved_but_the_coordinator():
    """The coordinator binds with SO_REUSEPORT, as gRPC does, and receives all connections."""
    with reserved_port() as port:
        for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            with socket.socket(family) as other, pytest.raises(OSError, match="in use"):
                other.bind((host, port))
        with socket.socket(socket.AF_INET6) as coordinator:
            coordinator.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            coordinator.bind(("::", port))
            coordinator.listen()
            for _ in range(8):
                with socket.create_connection(("127.0.0.1", port)):
                    coordinator.accept()[0].close()


def test_a_dead_process_is_noticed_within_a_minute():
    assert HEARTBEAT + GRACE < 60


def test_slurms_variables_are_enough(tmp_path):
    """The variables that srun sets for two tasks on one machine; JAX reads the rest itself."""
    slurm = dict(
        SLURM_JOB_ID=str(os.getpid()),  # JAX derives the port from it
        SLURM_STEP_NODELIST="localhost",
        SLURM_NTASKS="2",
        SLURM_STEP_NUM_TASKS="2",
    )
    arguments = (*TINY, "--cpu-devices", 1, "--steps", 2, "--checkpoint-dir", tmp_path)
    tasks = [start(*arguments, **slurm, SLURM_PROCID=str(i), SLURM_LOCALID=str(i)) for i in range(2)]
    for code, _, error in map(finish, tasks):
        assert code == 0, error
    assert steps_done(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    ("environment", "answer"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, False),  # a shell of salloc, without srun
        ({"SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_STEP_NUM_TASKS": "8"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"JAX_COORDINATOR_ADDRESS": "host:1"}, True),
        ({"KUBERNETES_SERVICE_HOST": "x"}, False),
        ({"KUBERNETES_SERVICE_HOST": "x", "JOB_COMPLETION_INDEX": "0"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
    ],
)
def test_a_cluster_is_one_when_a_scheduler_started_several_processes(environment, answer):
    assert in_cluster(environment) is answer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "sequence=3"], "needs 3 devices, but there are 8"),
        (["--data", "/nowhere"], "--data /nowhere does not exist"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--dry-run", "--kernel", "magic"], "kernel must be one of"),
        (["--dry-run", "--tokenizer", "/nowhere"], "--tokenizer /nowhere is not a file"),
        (["--layout", "round"], "round"),
        (["--no-such-flag"], "no-such-flag"),
    ],
)
def test_bad_input_ends_with_exit_code_2_and_one_line(capsys, arguments, message):
    try:
        code = cli.main(["train", *TINY, *arguments])
    except SystemExit as stopped:  # raised by the parser of flags
        code = stopped.code
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert "Traceback" not in error
    if error.startswith("striped:"):
        assert error.count("\n") == 1


@pytest.mark.parametrize("option", ["--data", "--validation"])
@pytest.mark.parametrize("fault", ["no column", "no column in the second shard", "cut short"])
def test_a_dry_run_refuses_data_that_the_run_would_in_the_same_words(option, fault, tmp_path, capsys):
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard, text in enumerate(["a text " * 99] * 2):
        column = "body" if fault == "no column" or (shard and fault != "cut short") else "text"
        pq.write_table(pa.table({column: [text] * 3}), folder / f"{shard}.parquet")
    if fault == "cut short":
        (folder / "1.parquet").write_bytes((folder / "1.parquet").read_bytes()[:-9])
    said = []
    for more in ((), ("--dry-run",)):
        assert cli.main(["train", *TINY, option, str(folder), "--data-cache", str(tmp_path / "cache"), *more]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1]
    assert ("is cut short or damaged" if fault == "cut short" else "has no column 'text'") in said[1]
    assert said[1].count("\n") == 1


def test_a_process_with_bad_input_ends_with_exit_code_2_and_one_line():
    code, out, error = run(*TINY, "--data", "/nowhere")
    assert (code, out) == (2, "")
    assert error.startswith("striped: --data /nowhere does not exist.")
    assert error.count("\n") == 1


def test_a_full_disk_is_told_and_loses_nothing(alone, tmp_path):
    """A limit on file size stands in for a full disk: writes fail with an OSError."""
    options = (*TINY, *TWO, "--checkpoint-every", 2)
    folder = shutil.copytree(alone, tmp_path / "run")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000))"
    again = (*options, "--checkpoint-dir", folder, "--resume", "--steps")
    code, _, error = run(*again, 9, before=limit)
    assert code == 2, error
    assert "could not be written" in error
    code, out, error = run(*again, 6)
    assert code == 0, error
    assert "Resuming from step 5." in out


def test_help_names_every_stable_flag(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    for flag in shlex.split("preset sequence-length mesh layout steps seed data checkpoint-dir resume"):
        assert f"--{flag}" in out


@pytest.mark.parametrize("model", ["a preset", "a run"])
def test_a_dry_run_starts_no_device(model, alone):
    arguments = shlex.split("--length 262144 --mesh sequence=8 --dry-run")
    start_from = ("--start-from", alone) if model == "a run" else ("--preset", "1b")
    code, out, error = run(*arguments, *start_from, JAX_PLATFORMS="no-such-platform")
    assert code == 0, error
    assert "parameters" in out
    assert "per device" in out
