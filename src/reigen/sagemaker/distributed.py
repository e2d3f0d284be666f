"""Configuration of a training job for SageMaker's SDK, which copies a driver script into every container."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

from sagemaker.train.distributed import DistributedConfig

from reigen.files import write_atomically
from reigen.net.auth import SECRET_BYTES

_DRIVER = Path(__file__).with_name("driver.py")
_SECRET_NAME = "secret"


class Distributed(DistributedConfig):
    """Configuration of a job whose containers run the entry script by `reigen run --nodes-from-env`.

    The container's image, or the job's requirements.txt, must have Reigen. Each job has a secret of its own, which goes
    with the driver script as an input channel of the job: who may read that may connect to the job's containers.

    Parameters:
        process_count_per_node: ranks of each container; None: as many as it has GPUs, or one.
        options: further options of `reigen run`, as words.

    Example::

        ModelTrainer(
            training_image=IMAGE,
            source_code=SourceCode(source_dir="code", entry_script="train.py"),
            compute=Compute(instance_type="ml.g5.12xlarge", instance_count=2),
            distributed=reigen.sagemaker.Distributed(process_count_per_node=4),
        ).train()
    """

    process_count_per_node: int | None = None
    options: list[str] | None = None

    @property
    def driver_dir(self) -> str:
        """Directory with the driver script and a new secret; it is removed when this process ends."""
        directory = tempfile.TemporaryDirectory(prefix="reigen-driver-")
        _DIRECTORIES.append(directory)
        script, secret = Path(directory.name, self.driver_script), Path(directory.name, _SECRET_NAME)
        write_atomically(script, [_DRIVER.read_bytes()])
        write_atomically(secret, [secrets.token_hex(SECRET_BYTES).encode()])
        os.chmod(secret, 0o600)  # noqa: PTH101
        return directory.name

    @property
    def driver_script(self) -> str:
        """Name of the driver script."""
        return "reigen_driver.py"


#: Directories of jobs, which the SDK reads in its own time.
_DIRECTORIES: list[tempfile.TemporaryDirectory[str]] = []
