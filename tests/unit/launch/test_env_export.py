"""Which variables go to other hosts, and what is made of them there."""

import os

import pytest

from reigen.errors import ConfigError
from reigen.launch.env_export import PACKAGE_DIRECTORY, merge_remote_environ, parse_exports, select_exported


def test_what_belongs_to_a_host_stays_at_home_unless_it_is_named():
    environ = {
        "HOME": "/home/me",
        "SSH_AUTH_SOCK": "/tmp/x",
        "DISPLAY": ":0",
        "TMPDIR": "/scratch/1",
        "BASH_FUNC_ml%%": "() { :; }",
        "CUDA_VISIBLE_DEVICES": "3",
        "NCCL_DEBUG": "INFO",
        "MY_HOME": "kept",
    }
    assert select_exported(environ, ()) == {"NCCL_DEBUG": "INFO", "MY_HOME": "kept"}
    assert select_exported(environ, ("TMPDIR",))["TMPDIR"] == "/scratch/1"


def test_what_is_asked_for():
    assert parse_exports({"A": "1"}, ["A", "B=2=3", "C="]) == {"A": "1", "B": "2=3", "C": ""}


@pytest.mark.parametrize(("wish", "message"), [("D", "no such variable"), ("=1", "neither"), ("a-b=1", "neither")])
def test_what_cannot_be_asked_for(wish, message):
    with pytest.raises(ConfigError, match=message):
        parse_exports({"A": "1"}, [wish])


def test_a_host_keeps_what_is_its_own():
    there = {"HOME": "/root", "PATH": "/usr/bin:/bin", "LANG": "C"}
    travelled = {"PATH": "/venv/bin:/usr/bin", "LANG": "C.UTF-8", "RANDOM_SEED": "1"}
    assert merge_remote_environ(there, travelled) == {
        "HOME": "/root",
        "PATH": "/venv/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "RANDOM_SEED": "1",
    }


def test_variables_that_an_engine_sets_on_each_host_are_kept_there():
    there, travelled = {"SLURM_NODEID": "1", "A": "1"}, {"SLURM_NODEID": "0", "SLURM_SUBMIT_DIR": "/w", "A": "2"}
    assert merge_remote_environ(there, travelled, kept=("SLURM_",)) == {
        "SLURM_NODEID": "1",
        "SLURM_SUBMIT_DIR": "/w",
        "A": "2",
    }


def test_reigens_own_directories_are_found_where_reigen_is_installed_there():
    travelled = {"PYTHONPATH": os.pathsep.join(["/else/reigen/compat", "/else/reigenes", "/data"])}
    assert merge_remote_environ({}, travelled, "/else/reigen")["PYTHONPATH"] == os.pathsep.join(
        [f"{PACKAGE_DIRECTORY}/compat", "/else/reigenes", "/data"]
    )
