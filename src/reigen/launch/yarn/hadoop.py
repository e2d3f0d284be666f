"""The Hadoop client that is installed here, in a Java process of ours, through py4j.

Nothing is written in Java: the client's own classes submit the application, ask for containers and start them, and know
how to prove who they are to the cluster. The Java process listens on loopback alone, asks for a token that was never on
a command line, and ends when this process does.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, TypeVar

from reigen.errors import ConfigError, LaunchError
from reigen.launch.supervision.process_tree import dies_with_parent
from reigen.resources.limits import explain_limit

#: Where a distribution of Hadoop says that it is.
_HOMES = ("HADOOP_YARN_HOME", "HADOOP_HOME", "HADOOP_COMMON_HOME")
_CONFIGURATIONS = ("HADOOP_CONF_DIR", "YARN_CONF_DIR")
_CLASSPATH_SECONDS = 60.0
#: One that is small and begins soon; the cluster's own options for clients come behind.
_JAVA_OPTIONS = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_HOW_TO_GET = (
    "install the cluster's Hadoop client, so that `hadoop` or `yarn` is in PATH (or HADOOP_HOME is set), and pip "
    "install py4j; or pip install pyspark, which brings a Hadoop client, and set HADOOP_CONF_DIR to the directory of "
    "the cluster's configuration"
)

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class HadoopClient:
    """Hadoop client that was found.

    Attributes:
        source: where, in words.
        classpath: of its classes and configuration; empty: ``program classpath`` says it.
        program: its ``hadoop`` or ``yarn``; empty: there is none.
        java: program that runs it.
    """

    source: str
    classpath: str
    program: str
    java: str


def find_hadoop(environ: Mapping[str, str]) -> HadoopClient:
    """Find a Hadoop client: the cluster's own, else that of pyspark or Spark. Nothing is started.

    Raises:
        ConfigError: there is none, or no Java, no py4j, no configuration; and how to get it.
    """
    if find_spec("py4j") is None:
        raise ConfigError(f"--launcher yarn needs py4j, by which it speaks to a Hadoop client: {_HOW_TO_GET}")
    java = _find_java(environ)
    configurations = [environ[name] for name in _CONFIGURATIONS if environ.get(name)]
    program = _find_program(environ)
    if program:
        return HadoopClient(program, "", program, java)
    jars = _find_spark_jars(environ)
    if jars is None:
        raise ConfigError(f"--launcher yarn: there is no Hadoop client here: {_HOW_TO_GET}")
    if not configurations:
        raise ConfigError(
            "--launcher yarn: HADOOP_CONF_DIR is not set: it names the directory with the cluster's yarn-site.xml and "
            "core-site.xml, without which nobody knows where the ResourceManager is"
        )
    return HadoopClient(str(jars), os.pathsep.join([*configurations, str(jars / "*")]), "", java)


def _find_java(environ: Mapping[str, str]) -> str:
    home = environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else "java"
    found = shutil.which(java, path=environ.get("PATH"))
    if found is None:
        where = f"JAVA_HOME={home} has none" if home else "JAVA_HOME is not set, and none is in PATH"
        raise ConfigError(f"--launcher yarn needs Java for the Hadoop client: {where}")
    return found


def _find_program(environ: Mapping[str, str]) -> str:
    for name in _HOMES:
        for program in ("yarn", "hadoop"):
            path = Path(environ.get(name) or "/nonexistent") / "bin" / program
            if os.access(path, os.X_OK):
                return str(path)
    found = (shutil.which(program, path=environ.get("PATH")) for program in ("yarn", "hadoop"))
    return next((path for path in found if path is not None), "")


def _find_spark_jars(environ: Mapping[str, str]) -> Path | None:
    """Return the directory of the jars of Spark, or of pyspark, that have a Hadoop client among them."""
    spec = find_spec("pyspark")
    places = [Path(environ["SPARK_HOME"]) / "jars"] if environ.get("SPARK_HOME") else []
    places += [Path(place) / "jars" for place in (spec.submodule_search_locations or [] if spec is not None else [])]
    return next((place for place in places if any(place.glob("hadoop-client-runtime-*.jar"))), None)


class Gateway:
    """Java process with a Hadoop client, and a context manager.

    Args:
        client: which one.
        environ: of the process.

    Attributes:
        jvm: py4j's view of its packages.

    Raises:
        LaunchError: it does not start.
    """

    def __init__(self, client: HadoopClient, environ: Mapping[str, str]) -> None:
        from py4j import java_gateway

        logging.getLogger("py4j").setLevel(logging.CRITICAL)  # errors are told to the user, by `explained`
        command = self._command(client, environ, java_gateway.find_jar_path())
        self._lines: deque[str] = deque(maxlen=20)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(environ),
                start_new_session=True,  # Ctrl-C at a terminal is not for it
                preexec_fn=dies_with_parent(),  # noqa: PLW1509  takes no lock
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise LaunchError(f"cannot start {client.java}: {explain_limit(error).strerror}") from None
        self._drain(self._process.stderr)
        port, token = self._read_address()
        self._drain(self._process.stdout)
        parameters = java_gateway.GatewayParameters(port=port, auth_token=token, auto_convert=True)
        self._gateway: Any = java_gateway.JavaGateway(gateway_parameters=parameters)
        self.jvm: Any = self._gateway.jvm

    @staticmethod
    def _command(client: HadoopClient, environ: Mapping[str, str], jar: str) -> list[str]:
        classpath = client.classpath
        if not classpath:
            try:
                classpath = subprocess.run(
                    [client.program, "classpath"],
                    env=dict(environ),
                    capture_output=True,
                    text=True,
                    check=True,
                    timeout=_CLASSPATH_SECONDS,
                ).stdout.strip()
            except (OSError, subprocess.SubprocessError) as error:
                raise LaunchError(f"{client.program} classpath: {error}") from None
        options = (*_JAVA_OPTIONS, *environ.get("YARN_CLIENT_OPTS", environ.get("HADOOP_CLIENT_OPTS", "")).split())
        paths = [jar, *(environ[name] for name in _CONFIGURATIONS if environ.get(name)), classpath]
        main = ["py4j.GatewayServer", "--die-on-broken-pipe", "--enable-auth", "0"]
        return [client.java, "-classpath", os.pathsep.join(paths), *options, *main]

    def _read_address(self) -> tuple[int, str]:
        assert self._process.stdout is not None, "it was asked for"
        port, token = self._process.stdout.readline().strip(), self._process.stdout.readline().strip()
        if not port.isdigit() or not token:
            self.close()
            raise LaunchError(f"the Java process of the Hadoop client has not started: {self._last_words}")
        return int(port), token

    def _drain(self, stream: Any) -> None:
        """Read everything that the process says, and keep the last lines."""

        def read() -> None:
            with suppress(ValueError, OSError):
                self._lines.extend(stream)

        threading.Thread(target=read, daemon=True, name="hadoop-client").start()

    @property
    def _last_words(self) -> str:
        return " / ".join(line.strip() for line in list(self._lines)[-3:]) or "it did not say why"

    @property
    def has_ended(self) -> bool:
        """Return whether the process has ended: no call will succeed any more."""
        return self._process.poll() is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process. May be called twice."""
        if (gateway := getattr(self, "_gateway", None)) is not None:
            # objects of Java's that Python drops later are not to be reported to a process that has gone
            gateway._gateway_client.is_connected = False
            gateway.close()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        self._process.kill()
        self._process.wait()

    def call(self, what: str, function: Callable[[], _Result]) -> _Result:
        """Call a function that uses ``jvm``; raises LaunchError about ``what`` with Hadoop's words."""
        with self.explained(what):
            return function()

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Make LaunchErrors of what goes wrong in the Hadoop client."""
        from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError

        try:
            yield
        except Py4JJavaError as error:
            raise LaunchError(f"{what}: {summarize_java_error(str(error.java_exception.toString()))}") from None
        except (Py4JNetworkError, OSError):
            raise LaunchError(f"{what}: the Java process of the Hadoop client has ended: {self._last_words}") from None
        except Py4JError as error:
            raise LaunchError(f"{what}: {error}") from None

    def configuration(self, settings: Mapping[str, str], file: str = "") -> Any:
        """Make a configuration of YARN's: the cluster's, with ``settings`` above it and ``file``'s below these."""
        configuration = self.jvm.org.apache.hadoop.yarn.conf.YarnConfiguration()
        if file:
            configuration.addResource(self.jvm.org.apache.hadoop.fs.Path(f"file://{file}"))
        for name, value in settings.items():
            configuration.set(name, value)
        return configuration

    def enums(self, value: Any) -> Any:
        """Make an array of Java's with one value of an enumeration."""
        array = self._gateway.new_array(getattr(self.jvm, value.getClass().getName()), 1)
        array[0] = value
        return array

    def strings(self, texts: Sequence[str]) -> Any:
        """Make an array of Java's strings."""
        array = self._gateway.new_array(self.jvm.java.lang.String, len(texts))
        for index, text in enumerate(texts):
            array[index] = text
        return array


def summarize_java_error(text: str) -> str:
    """Return the message of a Java exception, in one line, without the names of its class and of those around it."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("at ")]
    words = lines[0] if lines else text
    while True:
        name, has_colon, rest = words.partition(": ")
        if not has_colon or not rest or " " in name or not name.endswith(("Exception", "Error")):
            break
        words = rest
    return words
