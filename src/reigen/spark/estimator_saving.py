"""Estimators and models in files, alone and as stages of a Pipeline.

Params that JSON can hold are in ``metadata``, where Spark ML has them. The others (models, losses, callbacks ...) are
files in ``objects``, a Parquet file that Spark writes wherever it can write; ``objects.pkl`` in it is a pickle by
cloudpickle. Who loads a pickle runs the code that is in it: load only what you, or those you trust, have saved. A
message at warning level says it each time.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Iterator, Mapping
from typing import Any

import cloudpickle
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter

from reigen.errors import ArgumentError
from reigen.spark.params import TableParams

_log = logging.getLogger(__name__)
_PART_BYTES = 64 << 20
PICKLE = "objects.pkl"


class SavableParams(TableParams):
    """Base of what can be saved: `write`, `save`, `read` and `load` of Spark ML."""

    def write(self) -> MLWriter:
        """Return a writer: ``estimator.write().overwrite().save(path)``."""
        return _ObjectWriter(self)

    def save(self, path: str) -> None:
        """Save it to a new directory, which Spark writes; without the backend, and the store's ``storage_options``."""
        self.write().save(path)

    @classmethod
    def read(cls) -> Any:
        """Return a reader."""
        return _ObjectReader(cls)

    @classmethod
    def load(cls, path: str) -> Any:
        """Load a saved one, and run the code of pickles in it: see :mod:`reigen.spark.estimator_saving`.

        Raises:
            ArgumentError: something else was saved there.
        """
        return cls.read().load(path)

    def _to_files(self, objects: dict[str, Any]) -> dict[str, bytes]:
        """Return files of the params that JSON cannot hold."""
        return {PICKLE: cloudpickle.dumps(objects)} if objects else {}

    def _from_files(self, files: Mapping[str, bytes]) -> dict[str, Any]:
        """Return the params of `_to_files`."""
        if PICKLE not in files:
            return {}
        objects: dict[str, Any] = cloudpickle.loads(files[PICKLE])
        return objects


class _ObjectWriter(MLWriter):
    def __init__(self, instance: SavableParams) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:  # noqa: N802 - Spark's name
        instance = self._instance
        own = {param.name: value for param, value in instance._paramMap.items() if value is not None}
        of_objects = {each.name for each in instance.parameters if each.is_object}
        objects = {name: value for name, value in own.items() if name in of_objects}
        objects.pop("backend", None)  # a place, and no part of what is trained; its variables may be secret
        if "store" in objects:
            objects["store"] = objects["store"].without_options()
        files = instance._to_files(objects)
        plain = {name: value for name, value in own.items() if name not in of_objects}
        DefaultParamsWriter.saveMetadata(instance, path, self.sparkSession, {"objects": sorted(files)}, plain)
        if files:
            rows = [(name, number, part) for name, content in files.items() for number, part in _parts(content)]
            frame = self.sparkSession.createDataFrame(rows, "name string, number long, content binary")
            frame.coalesce(1).write.parquet(posixpath.join(path, "objects"))


class _ObjectReader(MLReader):
    def __init__(self, cls: type[SavableParams]) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> Any:
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        expected = f"{self._cls.__module__}.{self._cls.__name__}"
        if metadata["class"] != expected:
            raise ArgumentError(f"{path} is a {metadata['class']}, and no {expected}")
        instance = self._cls()
        instance._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(instance, metadata)
        files = self._read_files(path) if metadata.get("objects") else {}
        if PICKLE in files:
            _log.warning("%s has pickled objects, which are loaded: their author can run code here", path)
        return instance._set(**instance._from_files(files))

    def _read_files(self, path: str) -> dict[str, bytes]:
        frame = self.sparkSession.read.parquet(posixpath.join(path, "objects"))
        files: dict[str, bytes] = {}
        for row in frame.orderBy("name", "number").toLocalIterator():
            files[row["name"]] = files.get(row["name"], b"") + bytes(row["content"])
        return files


def _parts(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Divide a file into rows: Spark's are of 2 GiB at most."""
    for number, start in enumerate(range(0, max(len(content), 1), _PART_BYTES)):
        yield number, content[start : start + _PART_BYTES]
