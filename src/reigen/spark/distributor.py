"""`Distributor`: pyspark's TorchDistributor, with Reigen's ranks instead of torchrun's processes."""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from reigen.errors import ConfigError
from reigen.launch.local_plan import TORCHRUN_ENV_VARIABLE
from reigen.runner.call import run_on_this_host
from reigen.runner.engine_jobs import EngineJobOptions
from reigen.spark.call import START_TIMEOUT_SECONDS, SparkRequest, run_in_tasks
from reigen.spark.gpus import TaskGpus, gpu_variables
from reigen.spark.session import active_context

if TYPE_CHECKING:
    from pyspark import SparkContext

_TASK_GPUS, _DRIVER_GPUS = "spark.task.resource.gpu.amount", "spark.driver.resource.gpu.amount"
#: Asks for torchrun's variables.
_TORCHRUN = {TORCHRUN_ENV_VARIABLE: "1"}
_IGNORE_SSL = "pytorch.spark.distributor.ignoreSsl"


class Distributor:
    """Runner of functions and scripts in several processes, as pyspark's ``TorchDistributor`` has it.

    The processes are ranks of a job of Reigen's: they have torchrun's variables, too, so that
    ``torch.distributed.init_process_group()`` works in them.

    Args:
        num_processes: how many.
        local_mode: on the driver's host, instead of on the executors.
        use_gpu: one GPU for each process, of those that Spark has: a task holds ``spark.task.resource.gpu.amount`` of
            them, and has as many processes.

    Raises:
        ConfigError: (a ValueError) ``num_processes`` is no positive number.
        RuntimeError: there is no active SparkContext; or Spark has no GPUs, or encrypts its connections, which the
            ranks' do not unless REIGEN_TLS is set for them (pytorch.spark.distributor.ignoreSsl allows that).

    Example::

        Distributor(num_processes=4, local_mode=False, use_gpu=False).run(train, 1e-3)
    """

    def __init__(self, num_processes: int = 1, local_mode: bool = True, use_gpu: bool = True) -> None:
        if isinstance(num_processes, bool) or not isinstance(num_processes, int) or num_processes <= 0:
            raise ConfigError(f"num_processes has to be a positive integer, not {num_processes!r}")
        context = active_context()
        self.num_processes, self.local_mode, self.use_gpu = num_processes, local_mode, use_gpu
        self._ranks_per_task = 1
        if use_gpu and local_mode:
            self.num_processes = _limit_by_driver(context, num_processes)
        elif use_gpu:
            self._ranks_per_task = _gpus_per_task(context, num_processes)
        #: Number of tasks that Spark is asked for, outside of local mode.
        self.num_tasks = -(-self.num_processes // self._ranks_per_task)

    def run(
        self,
        train_object: Callable[..., Any] | str | Path,
        *args: Any,
        collect: Literal["first", "all"] = "first",
        **kwargs: Any,
    ) -> Any:
        """Call a function, or run a script, in all processes.

        Args:
            train_object: the function; or the path of a script, which must be there on every host.
            args: of the function, or of the script's command line.
            collect: ``"first"``: return what the function has returned in rank 0; ``"all"``: in all ranks, a list.
            kwargs: of the function.

        Returns:
            See ``collect``; None for a script, a list of None with ``"all"``.

        Raises:
            ConfigError: (a ValueError) keyword arguments for a script; ``collect`` is neither.
            RankFailedError, TimeoutError, LaunchError, UnsupportedTypeError: as `reigen.spark.run`.
        """
        if collect not in {"first", "all"}:
            raise ConfigError(f'collect must be "first" or "all", not {collect!r}')
        context = active_context()
        _check_ssl(context)
        func, arguments = train_object, args
        if isinstance(train_object, str | Path):
            if kwargs:
                raise ConfigError(f"a script has no keyword arguments: {', '.join(kwargs)}")
            func, arguments = run_script, (str(train_object), *map(str, args))
        elif not callable(train_object):
            raise ConfigError(f"run() takes a function, or the path of a script, not {train_object!r}")
        assert callable(func), "it is one of the two"
        if self.local_mode:
            environ = _TORCHRUN | (_driver_gpus(context, self.num_processes) if self.use_gpu else {})
            results = run_on_this_host(func, arguments, kwargs, self.num_processes, environ)
        else:
            request = SparkRequest(
                self.num_tasks,
                START_TIMEOUT_SECONDS,
                EngineJobOptions(num_ranks=self.num_processes, environ=_TORCHRUN),
                ranks_per_task=self._ranks_per_task,
            )
            results = run_in_tasks(context, (func, arguments, kwargs), request)
        return results if collect == "all" else results[0]


def run_script(path: str, *arguments: str) -> None:
    """Run a script as ``__main__``, with these arguments; sys.exit(0) is its end, as any other."""
    sys.argv[:] = [path, *arguments]
    sys.path.insert(0, str(Path(path).absolute().parent))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as error:
        if error.code not in {None, 0}:
            raise


def _gpus_per_task(context: SparkContext, num_processes: int) -> int:
    amount = _number(context, _TASK_GPUS)
    if amount < 1:
        raise RuntimeError(f"{_TASK_GPUS!r} was unset, so gpu usage is unavailable: set it, or give use_gpu=False")
    if num_processes % amount:
        raise RuntimeError(f"num_processes ({num_processes}) must be a multiple of {_TASK_GPUS!r} ({amount})")
    return amount


def _limit_by_driver(context: SparkContext, num_processes: int) -> int:
    available = _number(context, _DRIVER_GPUS)
    if available < 1:
        raise RuntimeError(f"{_DRIVER_GPUS!r} was unset, so the driver has no GPUs: set it, or give use_gpu=False")
    if num_processes > available:
        warnings.warn(f"num_processes is {available} now: the driver has no more GPUs", stacklevel=3)
    return min(num_processes, available)


def _driver_gpus(context: SparkContext, num_processes: int) -> dict[str, str]:
    """Return the variables for the first GPUs of the driver's."""
    addresses = tuple(context.resources["gpu"].addresses)[:num_processes]
    return gpu_variables([TaskGpus("", addresses, os.environ.get("CUDA_VISIBLE_DEVICES", ""))])


def _number(context: SparkContext, name: str) -> int:
    return int(context.getConf().get(name, "0") or 0)


def _check_ssl(context: SparkContext) -> None:
    conf = context.getConf()
    if (conf.get("spark.ssl.enabled", "false") or "").lower() != "true":
        return
    if (conf.get(_IGNORE_SSL, "false") or "").lower() != "true":
        raise RuntimeError(
            "this cluster encrypts its connections (spark.ssl.enabled), and those between ranks are only "
            f"authenticated, unless REIGEN_TLS=1 is set: to run all the same, set {_IGNORE_SSL}"
        )
