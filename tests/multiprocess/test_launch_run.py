"""`reigen run` with real processes: what ranks are given, what they print, how a job ends by itself."""

import os
import re
import resource
import signal
import subprocess
import sys

import pytest

from reigen.launch.exit_report import SIGKILL_HINT
from tests.multiprocess.launcher import DEADLINE_SECONDS, launched, python, run


def test_arguments_arrive_untouched_by_a_shell():
    arguments = ["a b", "$HOME", "*", "", "--flag", "-np", "--", ";", "ü"]
    code = "print(sys.argv[1:])"
    status, out, err = run("-np", "1", *python(code), *arguments)
    assert (status, out, err) == (0, f"[0] {arguments}\n", "")


def test_two_dashes_may_stand_before_the_command():
    assert run("-np", "1", "--no-prefix", "--", "echo", "--", "x") == (0, "-- x\n", "")


def test_the_environment_of_the_ranks_and_the_secrecy_of_the_secret():
    code = """
def read(name): return open(name, 'rb').read()
e = os.environ
secret = e['REIGEN_SECRET'].encode()
shown = any(secret in read(f'/proc/{pid}/cmdline') for pid in (os.getpid(), os.getppid()))
print(*[e[p + n] for p in ('REIGEN_', 'HOROVOD_') for n in ('RANK', 'SIZE', 'LOCAL_RANK', 'LOCAL_SIZE', 'CROSS_RANK',
      'CROSS_SIZE')], e['LOCAL_RANK'], e['WORLD_SIZE'], e['LOCAL_WORLD_SIZE'], e['MASTER_ADDR'], shown, len(secret))
print('same', e['REIGEN_RENDEZVOUS'], e['MASTER_PORT'], hash(e['REIGEN_SECRET']))
"""
    environ = {"PYTHONHASHSEED": "0"}
    status, out, err = run("-np", "2", "--verbose", "--torchrun-env", *python(code), env=environ)
    assert status == 0
    for rank in range(2):
        assert f"[{rank}] " + f"{rank} 2 {rank} 2 0 1 " * 2 + f"{rank} 2 2 127.0.0.1 False 64" in out
    assert len({line[4:] for line in out.splitlines() if "same" in line}) == 1
    assert re.search(r"rank 1: process \d+, .*OMP_NUM_THREADS=", err)
    assert not re.search("[0-9a-f]{32}", err)


@pytest.mark.parametrize("options", [(), ("--as-horovod",)])
@pytest.mark.parametrize("request_variable", [{}, {"REIGEN_TORCHRUN_ENV": "1"}])
def test_ranks_get_torchruns_variables_on_request_and_never_as_horovod(options, request_variable):
    """Accelerate, Transformers and timm start torch.distributed where they find them."""
    code = "print(sorted(set(os.environ) & {'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_PORT'}))"
    status, out, err = run(*options, "-np", "1", "--no-prefix", *python(code), env=request_variable)
    wanted = "['LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_PORT', 'RANK', 'WORLD_SIZE']"
    assert (status, err) == (0, "")
    assert out.strip() == (wanted if request_variable and not options else "[]")


@pytest.mark.parametrize("other", ["--as-horovod", "--mpi"])
def test_torchruns_variables_are_refused_where_they_cannot_be_set(other):
    status, _, err = run("-np", "1", "--torchrun-env", other, "true")
    assert status == 2
    assert "--torchrun-env" in err


def test_ranks_are_bound_to_processors_unless_told_not_to():
    here = sorted(os.sched_getaffinity(0))
    code = "print(sorted(os.sched_getaffinity(0)))"
    size = min(2, len(here))
    out = run("-np", str(size), "--no-prefix", *python(code))[1]
    shares = [eval(line) for line in out.splitlines()]  # noqa: S307  lists of numbers that this test printed
    assert sorted(cpu for share in shares for cpu in share) == here
    assert run("-np", "1", "--no-prefix", "--bind", "none", *python(code))[1] == f"{here}\n"


def test_stdout_and_stderr_stay_apart_and_lines_carry_their_rank():
    status, out, err = run("-np", "2", *python("print('out'); print('err', file=sys.stderr); print('end', end='')"))
    assert status == 0
    assert sorted(out.splitlines()) == ["[0] end", "[0] out", "[1] end", "[1] out"]
    assert sorted(err.splitlines()) == ["[0] err", "[1] err"]


def test_many_lines_of_many_ranks_arrive_whole_and_in_order():
    code = "for i in range(3000): sys.stdout.write(f'{rank}:{i}:' + 'x' * 200 + '\\n')"
    status, out, _ = run("-np", "3", *python(code))
    assert status == 0
    seen = {0: 0, 1: 0, 2: 0}
    for line in out.splitlines():
        match = re.fullmatch(r"\[(\d)\] (\d):(\d+):x{200}", line)
        assert match, line
        rank = int(match[1])
        assert (int(match[2]), int(match[3])) == (rank, seen[rank])
        seen[rank] += 1
    assert seen == {0: 3000, 1: 3000, 2: 3000}


def test_a_line_without_an_end_is_not_held_in_memory():
    code = "for _ in range(400): sys.stdout.write('x' * 10_000)"
    status, out, _ = run("-np", "1", *python(code))
    assert status == 0
    assert out.count("x") == 4_000_000


def test_stdin_belongs_to_rank_0():
    with launched("-np", "2", *python("print(sys.stdin.read())"), stdin=-1) as launcher:
        launcher.process.stdin.write(b"for rank zero")
        _, out, _ = launcher.finish()
    assert sorted(out.splitlines()) == ["[0] for rank zero", "[1] "]


def test_a_rank_that_ends_early_with_success_ends_nothing():
    with launched("-np", "2", *python("if rank: print('bye')\nelse: sys.stdin.read(); print('end')"), stdin=-1) as job:
        assert job.lines(1) == ["[1] bye"]
        assert job.finish()[:2] == (0, "[0] end\n")


def test_the_first_failure_is_reported_last_and_gives_the_exit_code():
    code = """
if rank != 1: time.sleep(300)
for i in range(30): print('line', i, file=sys.stderr)
sys.exit(7)
"""
    status, _, err = run("-np", "3", *python(code))
    assert status == 7
    block = err[err.index("reigen run: ") :].splitlines()
    assert block[0] == "reigen run: rank 1 failed first: exit code 7"
    assert block[1] == "  the last lines of its stderr:"
    assert block[2:22] == [f"    line {number}" for number in range(10, 30)]
    assert block[22:] == ["  2 other ranks were stopped because of it"]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_a_signal_ends(signum):
    code = f"if rank == 0: time.sleep(300)\nos.kill(os.getpid(), {int(signum)})"
    status, _, err = run("-np", "2", *python(code))
    assert status == 128 + signum
    hint = f"  {SIGKILL_HINT}\n" if signum == signal.SIGKILL else ""
    assert all(words in SIGKILL_HINT for words in ("kernel", "`kill -9`", "memory ran out", "dmesg"))
    assert err == (
        f"reigen run: rank 1 failed first: killed by {signum.name}\n"
        "  it wrote nothing to stderr\n" + hint + "  1 other rank was stopped because of it\n"
    )


@pytest.mark.parametrize("num_files", [7, 9, 12, 14, 18, 22])
def test_too_few_open_files_are_told_as_that(num_files):
    """Wherever the launcher, or the start of a rank, meets the limit."""
    limits = (num_files, num_files)
    code, out, err = run("-np", "2", "true", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits))
    assert (code, out) == (1, "")
    words = f"Too many open files: a process may have {num_files} open files here (RLIMIT_NOFILE): only root can raise"
    assert re.fullmatch(rf"reigen run: [^\n]*{re.escape(words)} what `ulimit -n` shows\n", err), err


def test_what_a_job_leaves_behind_is_ended():
    status, out, _ = run("-np", "2", "sh", "-c", "(setsid sleep 300 >/dev/null 2>&1 &); sleep 300 & echo done")
    assert status == 0
    assert sorted(out.splitlines()) == ["[0] done", "[1] done"]


@pytest.mark.parametrize(
    ("content", "mode", "status", "complaint"),
    [
        (None, 0, 127, "no such command: "),
        ("echo hi", 0o644, 126, "permission denied"),
        ("\0\1", 0o755, 126, "it is not a program"),
        ("#!/no/such/interpreter\n", 0o755, 126, "the interpreter in its first line does not exist"),
    ],
)
def test_a_command_that_cannot_run(tmp_path, content, mode, status, complaint):
    path = tmp_path / "command"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    code, out, err = run("-np", "2", str(path))
    assert (code, out) == (status, "")
    assert err.startswith("reigen run: ")
    assert complaint in err
    assert err.count("\n") == 1


def test_a_script_that_is_no_command_is_named_with_python(tmp_path):
    (tmp_path / "ok.py").write_text("print('ok')\n")
    code, out, err = run("-np", "2", "ok.py", cwd=tmp_path)
    assert (code, out) == (127, "")
    assert err == "reigen run: no such command: ok.py; to run the script: python ok.py\n"


def test_a_job_of_ranks_that_find_each_other():
    code = (
        "import numpy as np, reigen; reigen.init(); print(reigen.allreduce(np.ones(3) * reigen.rank(), op=reigen.Sum))"
    )
    status, out, err = run("-np", "3", sys.executable, "-c", code)
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[{rank}] [3. 3. 3.]" for rank in range(3)]


@pytest.mark.parametrize("slow", ["the interpreter", "its own word that it has left"])
def test_a_rank_that_fails_and_leaves_in_good_order_is_still_the_first_failure(slow):
    code = f"""
import atexit, select, sys
failing = False
def wind_up(*_):
    if failing:
        select.select([], [], [], 0.4)
if {slow == "the interpreter"}:
    atexit.register(wind_up)  # after shutdown()
import numpy as np, reigen
from reigen.cluster.local_peers import LocalPeers
if {slow != "the interpreter"}:
    LocalPeers.leave = wind_up  # the coordinator has heard of it before
reigen.init()
if reigen.rank() == 1:
    failing = True
    sys.exit(3)
reigen.allreduce(np.ones(10))
"""
    status, _, err = run("-np", "2", sys.executable, "-c", code)
    assert status == 3, err
    assert "rank 1 failed first: exit code 3" in err


@pytest.mark.slow
def test_torch_distributed_finds_its_port_and_nobody_else_does():
    code = """
import os, socket, torch, torch.distributed as dist
with socket.socket() as other:
    try:
        other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        raise SystemExit("somebody else was given the port")
    except OSError:
        pass
dist.init_process_group("gloo", init_method="env://")
x = torch.ones(2) * (dist.get_rank() + 1)
dist.all_reduce(x)
print(x.tolist())
dist.destroy_process_group()
"""
    status, out, err = run("-np", "2", "--torchrun-env", sys.executable, "-c", code)
    assert status == 0, err
    assert sorted(out.splitlines()) == ["[0] [3.0, 3.0]", "[1] [3.0, 3.0]"]


def test_what_ranks_print_is_kept_in_files_too(tmp_path):
    code = "os.write(1, f'ü {rank}'.encode() + bytes([13, 10])); print('err', rank, file=sys.stderr)"
    status, _, err = run("-np", "2", "--output-filename", str(tmp_path / "a" / "b"), *python(code))
    assert status == 0
    assert sorted(err.splitlines()) == ["[0] err 0", "[1] err 1"]
    for rank in range(2):
        directory = tmp_path / "a" / "b" / f"rank.{rank}"
        assert (directory / "stdout").read_bytes() == f"ü {rank}\r\n".encode()
        assert (directory / "stderr").read_bytes() == f"err {rank}\n".encode()


def test_output_that_cannot_be_kept(tmp_path):
    (tmp_path / "file").touch()
    status, _, err = run("-np", "1", "--output-filename", str(tmp_path / "file"), *python(""))
    assert (status, err) == (
        1,
        f"reigen run: cannot keep output in {tmp_path}/file/rank.0/stdout: Not a directory\n",
    )


def test_a_progress_bar_in_a_pipe_is_seen_before_its_line_ends():
    code = """
if rank == 0:
    sys.stderr.write('\\r 10%')
    sys.stderr.flush()
    sys.stdin.readline()
    print('go on')
"""
    with launched("-np", "2", *python(code), stdin=-1, stderr=subprocess.STDOUT) as launcher:
        assert launcher.process.stdout.read(9) == b"\r[0]  10%"
        launcher.process.stdin.write(b"\n")
        assert launcher.process.communicate(timeout=DEADLINE_SECONDS)[0] == b"\n[0] go on\n"


@pytest.mark.parametrize("size", [1, 3])
def test_an_error_that_all_ranks_raise_is_printed_once(size, tmp_path):
    """They wait for each other, so that none is stopped before it has printed."""
    code = f"""
import atexit
def wait():
    open({str(tmp_path)!r} + f'/{{rank}}.done', 'w').close()
    while sum(os.path.exists({str(tmp_path)!r} + f'/{{r}}.done') for r in range({size})) < {size}: time.sleep(0.01)
atexit.register(wait)
raise ValueError('the same everywhere')
"""
    status, _, err = run("-np", str(size), "--output-filename", str(tmp_path / "kept"), *python(code))
    assert status == 1
    assert err.count("Traceback") == 1
    last = err[err.index("reigen run: ") :]
    first = int(re.match(r"reigen run: rank (\d) failed first: exit code 1\n", last)[1])
    others = [str(rank) for rank in range(size) if rank != first]
    assert last.splitlines()[1:3] == ["  its error is the last one above:", "    ValueError: the same everywhere"]
    assert (f"\n  ranks {', '.join(others)} ended with the same error\n" in last) == (size > 1)
    for rank in range(size):
        assert "ValueError: the same everywhere" in (tmp_path / "kept" / f"rank.{rank}" / "stderr").read_text()


@pytest.mark.parametrize("options", [("-np", "1"), ("-np", "2")])
def test_a_script_for_horovod_that_is_run_without_as_horovod_is_told_so(options):
    status, _, err = run(*options, sys.executable, "-ISc", "import horovod.torch")
    assert status == 1
    assert "`reigen run --as-horovod ...`" in err
    assert "`python -m reigen.compat install`" in err
    other = run("-np", "1", sys.executable, "-ISc", "import horovod_tools")[2]
    assert "--as-horovod" not in other


def test_a_script_for_mxnets_kvstore_that_is_run_without_as_mxnet_is_told_so():
    words = 'MXNetError: Check  notnull: Environment::Get()->find("DMLC_NUM_WORKER") '
    status, _, err = run("-np", "1", *python(f"sys.exit({words!r})"))
    assert status == 1
    assert "`reigen run --as-mxnet -s SERVERS ...`" in err
