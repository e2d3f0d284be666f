"""What the launcher reads of the ranks' knobs."""

import subprocess
import sys
from dataclasses import fields

import pytest

from reigen.config import VARIABLES, Config, load_config
from reigen.launch.options import NetworkOptions

ENVIRONS = [
    {},
    {"REIGEN_NETWORK_INTERFACES": "eth0, ib0", "HOROVOD_GLOO_IFACE": "lo"},
    {"HOROVOD_GLOO_IFACE": "lo", "DMLC_INTERFACE": "eth1"},
    {"REIGEN_PEER_TIMEOUT": "7.5", "REIGEN_TLS": "on"},
    {"REIGEN_TLS": "0", "HOROVOD_START_TIMEOUT": "70", "HOROVOD_GLOO_TIMEOUT_SECONDS": "80"},
]


#: Fields of NetworkOptions, and the knobs of the ranks that they are.
KNOBS = {
    "interfaces": "network_interfaces",
    "peer_timeout_seconds": "peer_timeout_seconds",
    "tls": "tls",
    "start_timeout_seconds": "start_timeout_seconds",
}


def test_the_defaults_of_the_launcher_are_those_of_the_ranks():
    assert {field.name for field in fields(NetworkOptions)} == set(KNOBS)
    for name, knob in KNOBS.items():
        assert getattr(NetworkOptions(), name) == getattr(Config(), knob)


@pytest.mark.parametrize(
    ("name", "variable"), [(name, each) for name, knob in KNOBS.items() for each in VARIABLES[knob]]
)
def test_the_launcher_knows_every_variable_of_its_knobs(name, variable):
    environ = {variable: {"interfaces": "eth7", "tls": "1"}.get(name, "123")}
    assert getattr(NetworkOptions.from_environ(environ), name) == getattr(load_config(environ), KNOBS[name])
    assert getattr(load_config(environ), KNOBS[name]) != getattr(Config(), KNOBS[name])


@pytest.mark.parametrize("environ", ENVIRONS)
def test_launcher_and_ranks_read_the_same(environ):
    network, config = NetworkOptions.from_environ(environ), load_config(environ)
    assert network.interfaces == config.network_interfaces
    assert network.peer_timeout_seconds == config.peer_timeout_seconds
    assert network.tls == config.tls
    assert network.start_timeout_seconds == config.start_timeout_seconds


@pytest.mark.parametrize("text", ["", "soon", "0", "-3", "nan", "inf"])
def test_what_makes_no_sense_is_the_ranks_to_complain_about(text):
    assert (
        NetworkOptions.from_environ({"REIGEN_PEER_TIMEOUT": text}).peer_timeout_seconds == Config().peer_timeout_seconds
    )


@pytest.mark.parametrize(("peer_timeout", "silence"), [(20.0, 26.0), (1.0, 3.0), (1e9, 3600.0)])
def test_ranks_are_told_of_a_lost_host_before_the_launcher_ends_them(peer_timeout, silence):
    network = NetworkOptions(peer_timeout_seconds=peer_timeout)
    assert network.silence_seconds == silence
    assert network.last_silence_seconds == min(max(peer_timeout, 3.0), 3600.0)


@pytest.mark.parametrize("module", ["reigen.cli.run", "reigen.launch.agent.__main__"])
def test_what_starts_jobs_starts_fast(module):
    program = f"import sys, {module}; print({{'numpy', 'ssl', 'yaml', 'rich'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
