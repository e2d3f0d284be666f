"""What a job says of itself: where its knobs came from, on rank 0 alone, and each line's rank once."""

from __future__ import annotations

import re
import sys

from tests.multiprocess.launcher import run

PROGRAM = """
import os, threading
import reigen
reigen.init()
engine = next(thread for thread in threading.enumerate() if thread.name.startswith("reigen-engine"))
print("bound to", os.sched_getaffinity(engine.native_id))
reigen.shutdown()
reigen.init()
reigen.barrier()
"""
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} "


def test_knobs_and_their_origins_are_told_at_info_level():
    environ = {
        "REIGEN_LOG": "info",
        "HOROVOD_CACHE_CAPACITY": "7",
        "HOROVOD_CYCLE_TIME": "3",
        "HOROVOD_FUSION_TRESHOLD": "1",
        "HOROVOD_THREAD_AFFINITY": "0,77777",
    }
    status, out, err = run("-np", "2", sys.executable, "-c", PROGRAM, env=environ)
    assert status == 0, err
    assert "[0] bound to {0}" in out
    words = re.sub(f"(?m)^(\\[\\d\\] ){TIME}reigen ", r"\1", err).splitlines()
    service = [line for line in words if "control service at 127.0.0.1:" in line]
    assert len(service) == 1  # it is found once in a process
    first = [line for line in words if line.startswith("[0]") and line not in service]
    assert first[: len(first) // 2] == first[len(first) // 2 :]  # a second init() says it again, and once
    assert first[: len(first) // 2] == [
        "[0] info: 2 process(es), started by reigen run: REIGEN_RANK is set: rank 0 of 2",
        "[0] info: backend shm: all 2 ranks run on this host: shared memory is the shortest way between them",
        "[0] info: cache_capacity = 7 (default: 1024), set by HOROVOD_CACHE_CAPACITY",
        "[0] info: thread_affinity = (0, 77777) (default: ()), set by HOROVOD_THREAD_AFFINITY",
        "[0] info: log_level = info (default: warning), set by REIGEN_LOG",
        (
            "[0] info: HOROVOD_CYCLE_TIME has no effect: nothing waits for a cycle: an operation starts when its last "
            "rank has come"
        ),
        (
            "[0] warning: environment variables that mean nothing to Reigen: HOROVOD_FUSION_TRESHOLD "
            "(did you mean HOROVOD_FUSION_THRESHOLD?)"
        ),
    ]
    second = {line for line in words if line.startswith("[1]")}
    assert len(second) == 1
    assert "[1] warning: the engine's thread runs where it likes, processor 77777 cannot be used" in second.pop()


def test_without_the_launchers_prefix_messages_tell_the_rank_themselves():
    environ = {"HOROVOD_LOG_LEVEL": "info", "HOROVOD_LOG_HIDE_TIME": "1"}
    status, _, err = run("-np", "2", "--no-prefix", sys.executable, "-c", "import reigen; reigen.init()", env=environ)
    assert status == 0
    assert "reigen info rank 0: log_hide_time = True (default: False), set by HOROVOD_LOG_HIDE_TIME\n" in err
    assert "rank 1" not in err


def test_options_and_the_configuration_file_reach_the_ranks(tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("params: {cache_capacity: 5, cycle_time_ms: 1}\nlogging: {level: info}\nwether: fine\n")
    line = ["-np", "1", "-H", "localhost:2", "--config-file", str(file), "--fusion-threshold-mb", "2", "--gloo"]
    program = "import reigen; reigen.init(); print('done')"
    environ = {"HOROVOD_FUSION_THRESHOLD": "7"}
    status, out, err = run(*line, "-prefix-timestamp", sys.executable, "-c", program, env=environ)
    assert status == 0, err
    assert re.fullmatch(f"{TIME}\\[0\\] done\n", out)
    told = re.sub(f"(?m)^{TIME}\\[0\\] {TIME}", "", err).splitlines()
    assert (
        told[0] == "reigen run: accepted, without effect here: params.cycle_time_ms in the configuration file, --gloo"
    )
    assert told[1] == "reigen run: the configuration file has settings that mean nothing: wether"
    default = 128 << 20
    assert f"reigen info: fusion_threshold_bytes = 2097152 (default: {default}), set by --fusion-threshold-mb" in told
    origin = "params.cache_capacity in the configuration file"
    assert f"reigen info: cache_capacity = 5 (default: 1024), set by {origin}" in told
