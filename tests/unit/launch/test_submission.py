"""What `reigen launch` does with a job that it has submitted; and the jobs that it makes for Grid Engine."""

from __future__ import annotations

import os
import shlex
import signal
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from reigen.cli import launch
from reigen.cli.submission_options import arguments_before_command
from reigen.errors import ConfigError, LaunchError
from reigen.launch import submission
from reigen.launch.sge import submission as sge_submission
from reigen.launch.sge.submission import (
    SgeSubmission,
    choose_job_name,
    find_account,
    find_lines,
    find_state,
)
from reigen.launch.submission import (
    SubmissionOptions,
    SubmissionRequest,
    SubmittedPhase,
    SubmittedState,
    run_client,
    run_submission,
)

WAITING, RUNNING = SubmittedState(SubmittedPhase.WAITING, "no slots"), SubmittedState(SubmittedPhase.RUNNING)


class Job:
    """A submission whose engine answers as the test says, one answer for each question."""

    preview, cancel_command = "what is submitted", "delete 7"

    def __init__(self, *answers: SubmittedState | LaunchError | Callable[[], SubmittedState]) -> None:
        self._answers = list(answers)
        self.output: list[tuple[int, bytes]] = []
        self.num_cancelled = self.num_closed = 0
        self.left: list[str] = []
        self.engine_seconds = 0.0

    def submit(self) -> str:
        return "job 7"

    def poll(self) -> SubmittedState:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, LaunchError):
            raise answer
        return answer() if callable(answer) else answer

    def read_output(self) -> Iterable[tuple[int, bytes]]:
        found, self.output = self.output, []
        return found

    def cancel(self) -> float:
        self.num_cancelled += 1
        self._answers = [SubmittedState(SubmittedPhase.ENDED, "deleted")]
        return self.engine_seconds

    def close(self) -> Sequence[str]:
        self.num_closed += 1
        return self.left


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "_OUTPUT_SECONDS", 0.01)
    monkeypatch.setattr(submission, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(submission, "_SAME_SIGNAL_SECONDS", 0.01)


def ended(code: int | None, reason: str = "") -> SubmittedState:
    return SubmittedState(SubmittedPhase.ENDED, reason, code)


class TestFollowing:
    def test_the_exit_code_and_the_output_are_the_jobs(self, capfd: pytest.CaptureFixture[str]) -> None:
        job = Job(WAITING, RUNNING, ended(7))
        job.output = [(1, b"out\n"), (2, b"err\n")]
        assert run_submission(job) == 7
        out, err = capfd.readouterr()
        assert (out, job.num_closed) == ("out\n", 1)
        assert err.startswith("reigen run: job 7 is submitted; Ctrl-C cancels it (delete 7)\n")
        assert "err\n" in err
        assert "reigen run: job 7 runs, after 0 s\n" in err

    def test_what_was_printed_last_is_read_after_the_end(self, capfd: pytest.CaptureFixture[str]) -> None:
        job = Job()

        def end() -> SubmittedState:
            job.output = [(1, b"the last words\n")]
            return ended(0)

        job._answers = [RUNNING, end]
        assert run_submission(job) == 0
        assert capfd.readouterr()[0] == "the last words\n"

    def test_what_is_waited_for_is_said(
        self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(submission, "_NEWS_SECONDS", 0.01)
        assert run_submission(Job(WAITING, WAITING, ended(0))) == 0
        assert "job 7 has waited for 0 s: no slots" in capfd.readouterr()[1]

    def test_an_end_without_a_code_is_an_error_with_its_reason(self, capfd: pytest.CaptureFixture[str]) -> None:
        assert run_submission(Job(ended(None, "its host has crashed"))) == 1
        assert "job 7 has ended: its host has crashed" in capfd.readouterr()[1]

    def test_an_engine_that_does_not_answer_for_a_while_is_borne(self) -> None:
        assert run_submission(Job(LaunchError("no answer"), RUNNING, LaunchError("no answer"), ended(3))) == 3

    def test_an_engine_that_does_not_answer_for_long_is_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(submission, "_UNANSWERED_SECONDS", 0.0)
        with pytest.raises(LaunchError, match="no answer\njob 7 is given up; to remove it: delete 7"):
            run_submission(Job(LaunchError("no answer")))

    @pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_a_signal_cancels_the_job_once_and_waits_for_its_end(
        self, signum: int, capfd: pytest.CaptureFixture[str]
    ) -> None:
        def stop() -> SubmittedState:
            os.kill(os.getpid(), signum)
            return RUNNING

        before = signal.getsignal(signum)
        job = Job(WAITING, stop, RUNNING)
        assert run_submission(job) == 128 + signum
        assert (job.num_cancelled, job.num_closed, signal.getsignal(signum)) == (1, 1, before)
        assert f"{signal.Signals(signum).name}: job 7 is cancelled" in capfd.readouterr()[1]

    def test_a_second_signal_leaves_the_job_to_the_engine(self, capfd: pytest.CaptureFixture[str]) -> None:
        class Stubborn(Job):
            def cancel(self) -> float:
                self.num_cancelled += 1
                return 0.0

        def stop() -> SubmittedState:
            os.kill(os.getpid(), signal.SIGINT)
            return RUNNING

        job = Stubborn(stop, stop, RUNNING)
        job.left = ["a file is left; rm file"]
        assert (run_submission(job), job.num_cancelled) == (130, 1)
        err = capfd.readouterr()[1]
        assert "a second signal: job 7 may still be there; to remove it: delete 7" in err
        assert "a file is left; rm file" in err

    def test_a_signal_while_the_engine_takes_the_job_cancels_it_then(self, capfd: pytest.CaptureFixture[str]) -> None:
        class Slow(Job):
            def submit(self) -> str:
                os.kill(os.getpid(), signal.SIGINT)
                return super().submit()

        job = Slow(RUNNING)
        assert (run_submission(job), job.num_cancelled, job.num_closed) == (130, 1, 1)
        said = [line.removeprefix("reigen run: ") for line in capfd.readouterr()[1].splitlines()]
        waits = "the job is cancelled as soon as it is submitted; a second signal does not wait for that"
        assert [said[0], said[2]] == [f"SIGINT: {waits}", "SIGINT: job 7 is cancelled; waiting for its end"]

    def test_a_second_signal_does_not_wait_for_a_reader(self, capfd: pytest.CaptureFixture[str]) -> None:
        def stand_still(descriptor: int, data: bytes) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            threading.Event().wait(600)

        job = Job(RUNNING)
        job.output = [(1, b"text")]
        assert (run_submission(job, stand_still), job.num_closed) == (143, 1)
        assert "a second signal: job 7 may still be there" in capfd.readouterr()[1]

    def test_signals_that_come_together_are_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(submission, "_SAME_SIGNAL_SECONDS", 60.0)

        class Slow(Job):
            def submit(self) -> str:
                for signum in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
                    os.kill(os.getpid(), signum)
                return super().submit()

        job = Slow(RUNNING)
        assert (run_submission(job), job.num_cancelled) == (128 + signal.SIGHUP, 1)

    def test_a_signal_ends_the_writing_of_the_rest(self, capfd: pytest.CaptureFixture[str]) -> None:
        class Talking(Job):
            def read_output(self) -> list[tuple[int, bytes]]:
                return [(1, b"text")]

        written = []

        def write(descriptor: int, data: bytes) -> None:
            written.append(data)
            if len(written) == 5:
                os.kill(os.getpid(), signal.SIGTERM)

        assert run_submission(Talking(ended(0)), write) == 143
        assert len(written) == 5
        assert "SIGTERM: the rest of the job's output is not written" in capfd.readouterr()[1]

    def test_a_second_signal_does_not_wait_for_an_engine_that_is_told_of_the_first(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        class Mute(Job):
            def cancel(self) -> float:
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
                run_client(["sleep", "600"])
                return 0.0

        def stop() -> SubmittedState:
            os.kill(os.getpid(), signal.SIGTERM)
            return RUNNING

        job = Mute(stop, RUNNING)
        assert (run_submission(job), job.num_closed) == (143, 1)
        assert "a second signal: job 7 may still be there; to remove it: delete 7" in capfd.readouterr()[1]

    @pytest.mark.parametrize("call", ["submit", "poll", "close"])
    def test_a_second_signal_does_not_wait_for_the_engine(self, call: str, capfd: pytest.CaptureFixture[str]) -> None:
        class Mute(Job):
            def ask(self) -> None:
                os.kill(os.getpid(), signal.SIGTERM)
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
                run_client(["sleep", "600"])

        job = Mute(ended(3))
        usual = getattr(job, call)
        setattr(job, call, lambda: (job.ask(), usual())[1])
        assert run_submission(job) == (3 if call == "close" else 143)
        assert job.num_closed == (call != "close")
        err = capfd.readouterr()[1]
        assert "SIGTERM: " in err
        left = "files made for the job" if call == "close" else {"submit": "the job", "poll": "job 7"}[call]
        assert f"{'another' if call == 'close' else 'a second'} signal: {left} may" in err

    def test_without_a_reader_of_its_output_the_job_is_cancelled(self) -> None:
        def refuse(descriptor: int, data: bytes) -> None:
            raise BrokenPipeError

        job = Job(RUNNING)
        job.output = [(1, b"a"), (1, b"b")]
        assert (run_submission(job, refuse), job.num_cancelled) == (128 + signal.SIGPIPE, 1)

    def test_a_cancelled_job_has_its_own_grace_before_it_is_left(
        self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(submission, "_CANCEL_SECONDS", 0.0)

        class Slow(Job):
            def cancel(self) -> float:
                self._answers = [RUNNING, RUNNING, ended(0)]
                return self.engine_seconds

        def stop() -> SubmittedState:
            os.kill(os.getpid(), signal.SIGINT)
            return RUNNING

        assert run_submission(Slow(stop, RUNNING), grace_seconds=30.0) == 130
        assert "may still be there" not in capfd.readouterr()[1]
        of_an_engine = Slow(stop, RUNNING)
        of_an_engine.engine_seconds = 30.0
        assert run_submission(of_an_engine) == 130
        assert "may still be there" not in capfd.readouterr()[1]
        assert run_submission(Slow(stop, RUNNING)) == 130
        assert "it has not ended within 0 s: job 7 may still be there" in capfd.readouterr()[1]

    def test_a_job_that_prints_without_end_is_still_asked_for_its_state(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        class Talker(Job):
            num_left = 1000

            def read_output(self) -> Iterable[tuple[int, bytes]]:
                self.num_left -= 1
                return [(1, b".")] if self.num_left >= 0 else []

        job = Talker(RUNNING, ended(3))
        assert run_submission(job) == 3
        assert capfd.readouterr()[0] == "." * 1000  # all of it, when it has ended


class TestClients:
    def test_one_that_is_not_there_or_does_not_end_is_an_error(self) -> None:
        with pytest.raises(LaunchError, match="cannot start no-such-client: No such file"):
            run_client(["no-such-client"])
        with pytest.raises(LaunchError, match=r"sleep has not answered within 0\.05 s"):
            run_client(["sleep", "600"], timeout_seconds=0.05)

    def test_a_terminals_ctrl_c_is_not_for_them(self) -> None:
        ended = run_client(["sh", "-c", "ps -o sid= -p $$ || cut -d' ' -f6 /proc/$$/stat"])
        assert int(ended.stdout) != os.getsid(0)


class TestCommandLine:
    def test_the_arguments_before_the_command_are_kept(self) -> None:
        for words in (["-n", "2", "--print", "--launcher", "sge"], ["-n", "2", "--launcher", "sge", "--"]):
            arguments = [*words, "python", "-n", "--print"]
            kept = arguments_before_command(arguments, ["python", "-n", "--print"])
            assert kept == ("-n", "2", "--launcher", "sge")

    def test_print_is_for_launchers_that_submit(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            launch.main(["-n", "2", "--launcher", "local", "--print", "true"])
        assert "--print: --launcher local submits no job; " in capsys.readouterr().err

    def test_without_workers_there_is_no_job(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            launch.main(["-n", "0", "--launcher", "local", "true"])
        assert "the number of workers must be at least 1, not 0" in capsys.readouterr().err

    def test_a_host_file_is_not_for_them(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            launch.main(["-n", "2", "--launcher", "sge", "-H", "hosts", "true"])
        assert "--hostfile: --launcher sge gives the job its hosts" in capsys.readouterr().err


@pytest.fixture
def grid_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with Grid Engine's clients, which write down what they are asked, and answer from files."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("qsub", "qstat", "qdel", "qacct", "qconf"):
        (tools / name).write_text(f'#!/bin/sh\necho "$@" >>{tools}/{name}.asked\ncat {tools}/{name}.answer\n')
        (tools / name).chmod(0o755)
        (tools / f"{name}.answer").write_text("")
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tools


def request(tmp_path: Path, **more: object) -> SubmissionRequest:
    options = SubmissionOptions(**more)  # type: ignore[arg-type]
    environ = {**os.environ, "MINE": "it's $HOME\n", "bad-name": "x", "UID": "7", "SHELLOPTS": "errexit"}
    arguments = ("--launcher", "sge", "-n", "3")
    return SubmissionRequest(arguments, ("python", "train it.py"), 3, 2, options, environ, directory=tmp_path)


class TestGridEngineJobs:
    def test_nothing_of_the_environment_and_the_command_is_in_what_qsub_gets(
        self, grid_engine: Path, tmp_path: Path
    ) -> None:
        (grid_engine / "qsub").write_text(
            f'#!/bin/sh\necho "$@" >{grid_engine}/words\ncat >{grid_engine}/script\necho 17\n'
        )
        job = SgeSubmission(request(tmp_path, sge_pe="mpi", queue="all.q", worker_memory="2g", server_memory="512m"))
        assert job.submit() == "Grid Engine job 17 (train_it.py)"
        words = (grid_engine / "words").read_text().split()
        assert words[:10] == ["-terse", "-cwd", "-S", "/bin/sh", "-N", "train_it.py", "-pe", "mpi", "5", "-q"]
        assert "h_vmem=2048M" in words
        [directory] = tmp_path.glob(".train_it.py.*")
        assert (grid_engine / "script").read_text() == f"#!/bin/sh\n. {shlex.quote(str(directory / 'job'))}\n"
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        text = (directory / "job").read_text()
        assert stat.S_IMODE((directory / "job").stat().st_mode) == 0o600
        assert "export MINE='it'\"'\"'s $HOME\n'\n" in text
        assert "bad-name" not in text
        assert not [line for line in text.splitlines() if line.startswith(("export UID=", "export SHELLOPTS="))]
        assert text.splitlines()[-1].endswith(f"--exit-code-file {directory}/exit-code -- python 'train it.py'")
        assert job.cancel_command == "qdel 17"

    def test_its_end_is_that_of_the_file_or_of_the_accounting(self, grid_engine: Path, tmp_path: Path) -> None:
        (grid_engine / "qsub.answer").write_text("17\n")
        job = SgeSubmission(request(tmp_path, sge_pe="mpi"))
        job.submit()
        row = "     17 0.55500 J          me           {}     01/01/2026 10:00:00                 5\n"
        (grid_engine / "qstat.answer").write_text(row.format("qw"))
        assert job.poll().phase is SubmittedPhase.WAITING
        (grid_engine / "qstat.answer").write_text(row.format("r"))
        assert job.poll() == SubmittedState(SubmittedPhase.RUNNING)
        assert len(job.close()) == 1
        (grid_engine / "qstat.answer").write_text("")
        assert job.poll().phase is SubmittedPhase.RUNNING  # the accounting takes its time
        (grid_engine / "qacct.answer").write_text(
            "jobname J\nfailed       100 : assumedly after job\nexit_status  137\n"
        )
        assert job.poll() == ended(137, "Grid Engine says: failed 100 : assumedly after job, and qacct -j more")
        [directory] = tmp_path.glob(".train_it.py.*")
        (directory / "exit-code").write_text("7\n")
        assert job.poll() == ended(7)
        assert (job.close(), list(tmp_path.glob(".train_it.py.*"))) == ((), [])

    def test_a_job_in_error_is_deleted_and_its_reason_said(self, grid_engine: Path, tmp_path: Path) -> None:
        (grid_engine / "qsub.answer").write_text("17\n")
        job = SgeSubmission(request(tmp_path, sge_pe="mpi"))
        job.submit()
        (grid_engine / "qstat.answer").write_text(
            "     17 0.5 J me Eqw 01/01/2026\nerror reason    1: can't chdir to /x\n"
        )
        assert job.poll() == ended(1, "it could not be started (Eqw): 1: can't chdir to /x".replace("1: ", "", 1))
        assert (grid_engine / "qdel.asked").read_text() == "17\n"
        assert (job.close(), list(tmp_path.glob(".train_it.py.*"))) == ((), [])

    def test_output_is_read_as_it_grows(self, grid_engine: Path, tmp_path: Path) -> None:
        (grid_engine / "qsub.answer").write_text("17\n")
        job = SgeSubmission(request(tmp_path, sge_pe="mpi", sge_log_dir=Path("logs"), job_name="J"))
        assert not list(job.read_output())
        job.submit()
        assert not list(job.read_output())
        (tmp_path / "logs/J.o17").write_bytes(b"half a")
        assert list(job.read_output()) == [(1, b"half a")]
        (tmp_path / "logs/J.o17").write_bytes(b"half a line\n")
        (tmp_path / "logs/J.e17").write_bytes(b"err")
        assert list(job.read_output()) == [(1, b" line\n"), (2, b"err")]
        assert not list(job.read_output())

    def test_of_much_output_a_part_is_read_at_a_time(
        self, grid_engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sge_submission, "_READ_BYTES", 4)
        (grid_engine / "qsub.answer").write_text("17\n")
        job = SgeSubmission(request(tmp_path, sge_pe="mpi", job_name="J"))
        job.submit()
        (tmp_path / "J.o17").write_bytes(b"one two")
        assert [list(job.read_output()) for _ in range(3)] == [[(1, b"one ")], [(1, b"two")], []]

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"job_name": "7up"}, "--jobname 7up: Grid Engine wants letters"),
            ({"job_name": "a b"}, "--jobname a b"),
            ({"worker_memory": "much"}, "--worker-memory much: it is no size of memory like 4g"),
            ({"server_cores": 0}, "--server-cores 0: at least 1"),
            ({"gpus": 1}, "--gpus: Grid Engine has no common name"),
            ({"sge_log_dir": Path("a,b")}, "takes no path with a comma"),
        ],
    )
    def test_options_that_mean_nothing_to_it(
        self, grid_engine: Path, tmp_path: Path, options: dict[str, object], words: str
    ) -> None:
        with pytest.raises(ConfigError, match=words):
            SgeSubmission(request(tmp_path, **options))

    def test_what_qsub_refuses_is_said_in_its_words(self, grid_engine: Path, tmp_path: Path) -> None:
        (grid_engine / "qsub").write_text("#!/bin/sh\necho 'Unable to run job: unknown queue \"x\".' >&2\nexit 1\n")
        job = SgeSubmission(request(tmp_path, sge_pe="mpi"))
        with pytest.raises(LaunchError, match='qsub has not taken the job: Unable to run job: unknown queue "x"'):
            job.submit()
        assert (job.close(), list(tmp_path.glob(".train_it.py.*"))) == ((), [])

    def test_without_a_parallel_environment_there_is_no_job(self, grid_engine: Path, tmp_path: Path) -> None:
        with pytest.raises(LaunchError, match="there is no parallel environment: an administrator makes one"):
            SgeSubmission(request(tmp_path)).submit()


class TestGridEngineAnswers:
    def test_a_name_is_made_of_the_command(self) -> None:
        assert choose_job_name(None, ("python", "-u", "dir/train me.py")) == "train_me.py"
        assert choose_job_name(None, ("./7zip",)) == "job_7zip"

    def test_the_state_is_that_of_the_job_of_the_number(self) -> None:
        table = "job-ID  prior name user state\n-----\n      1 0.5 a b r 1\n     11 0.5 a b qw 1\n"
        assert [find_state(table, number) for number in ("1", "11", "111")] == ["r", "qw", None]

    def test_reasons_of_qstat_become_one_line(self) -> None:
        text = (
            "job_name: J\nscheduling info:            queue is full\n                            no slots\nother: x\n"
        )
        assert find_lines(text, "scheduling info") == "queue is full; no slots"
        assert not find_lines(text, "error reason")
        assert not find_lines(
            "scheduling info: (Collecting of scheduler job information is turned off)\n", "scheduling info"
        )

    def test_the_last_record_of_the_accounting_counts(self) -> None:
        assert find_account("") is None
        assert find_account("failed 0\nexit_status 99\n====\nfailed       0\nexit_status  0\n") == ended(0)
