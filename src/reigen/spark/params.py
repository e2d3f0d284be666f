"""Params of estimators and of the models that they make: one table each, of which setters and getters are made."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params, TypeConverters

from reigen.errors import ArgumentError

_P = TypeVar("_P", bound=type)


@dataclass(frozen=True)
class ParamSpec:
    """Row of a table.

    Attributes:
        name: of the Param, and of the keyword of the constructor.
        meaning: its documentation.
        default: its value where none was given.
        convert: checks a value and returns the one to keep; raises TypeError or ValueError.
        method: ``Epochs`` of ``setEpochs`` and ``getEpochs``, where it is not the name without underscores.
        is_object: it is saved as a pickle, and not as JSON.
    """

    name: str
    meaning: str
    default: Any = None
    convert: Callable[[Any], Any] | None = None
    method: str = ""
    is_object: bool = False


def _positive(value: Any) -> int:
    number: int = TypeConverters.toInt(value)
    if number < 1:
        raise ArgumentError(f"must be at least 1, got {number}")
    return number


def _not_negative(value: Any) -> int:
    number: int = TypeConverters.toInt(value)
    if number < 0:
        raise ArgumentError(f"must not be negative, got {number}")
    return number


def _validation(value: Any) -> float | str:
    if isinstance(value, str):
        return value
    share: float = TypeConverters.toFloat(value)
    if not 0 < share < 1:
        raise ArgumentError(f"must be a share of the rows between 0 and 1, or the name of a column, got {share}")
    return share


def check_shapes(value: Any) -> list[list[int]]:
    """Return shapes as lists of numbers, or raise TypeError."""
    if not isinstance(value, Sequence) or not all(isinstance(each, Sequence) for each in value):
        raise TypeError(f"a list of shapes is needed, such as [[-1, 28, 28]], got {value!r}")
    return [[TypeConverters.toInt(size) for size in shape] for shape in value]


def check_callable(value: Any) -> Any:
    """Return a function, or raise TypeError."""
    if not callable(value):
        raise TypeError(f"a function is needed, got {type(value).__name__}")
    return value


def _start_method(value: Any) -> str:
    if value not in {"fork", "spawn", "forkserver"}:
        raise ArgumentError(f"must be fork, spawn or forkserver, got {value!r}")
    return str(value)


_TEXT, _TEXTS, _FLAG = TypeConverters.toString, TypeConverters.toListString, TypeConverters.toBoolean

ESTIMATOR_PARAMETERS = (
    ParamSpec("num_proc", "number of training processes; not together with backend", None, _positive),
    ParamSpec("backend", "where the training processes run; by default on Spark's executors", is_object=True),
    ParamSpec("store", "directories for data and checkpoints (Store.create)", is_object=True),
    ParamSpec("model", "the model to train", is_object=True),
    ParamSpec("optimizer", "the optimizer", is_object=True),
    ParamSpec("loss", "the loss, or a list of one for each label", is_object=True),
    ParamSpec("loss_weights", "factors of the losses of several labels", None, TypeConverters.toListFloat),
    ParamSpec("metrics", "metrics to report", is_object=True),
    ParamSpec("sample_weight_col", "column with weights of the rows", None, _TEXT),
    ParamSpec("feature_cols", "columns that the model gets, one for each of its inputs", None, _TEXTS),
    ParamSpec("label_cols", "columns that the model should give, one for each of its outputs", None, _TEXTS),
    ParamSpec("label_shapes", "shapes of the labels, -1 for the rows: [[-1, 1]]", None, check_shapes),
    ParamSpec("validation", "share of rows for validation, or a column that is true for those", None, _validation),
    ParamSpec("batch_size", "rows in a step of one process", 32, _positive),
    ParamSpec("val_batch_size", "the same in validation; by default batch_size", None, _positive),
    ParamSpec("epochs", "number of epochs", 1, _positive),
    ParamSpec("shuffle", "shuffle the rows, in another order each epoch", True, _FLAG),
    ParamSpec("random_seed", "seed of everything random; by default a random one", None, TypeConverters.toInt),
    ParamSpec("verbose", "0: print nothing; 1: a line an epoch, or what Keras prints", 1, TypeConverters.toInt),
    ParamSpec("callbacks", "callbacks of the training", is_object=True),
    ParamSpec("run_id", "name of the run in the store; one that was interrupted goes on", None, _TEXT),
    ParamSpec("train_steps_per_epoch", "steps of an epoch; by default all rows once", None, _positive),
    ParamSpec("validation_steps_per_epoch", "batches of a validation; by default all rows", None, _positive),
    ParamSpec("transformation_fn", "function of a pandas.DataFrame of rows", None, check_callable, is_object=True),
    ParamSpec("transformation_edit_fields", "accepted: types follow transformation_fn", is_object=True),
    ParamSpec("transformation_removed_fields", "columns to drop after transformation_fn", None, _TEXTS),
    ParamSpec("backward_passes_per_step", "batches whose gradients are added up in one step", 1, _positive),
    ParamSpec("gradient_compression", "Compression of gradients on their way", is_object=True),
    ParamSpec("partitions_per_process", "files that rows are written to, for each process", 10, _positive),
    ParamSpec("inmemory_cache_all", "keep all rows in the processes' memory", False, _FLAG, method="InMemoryCacheAll"),
    ParamSpec("use_gpu", "train on GPUs where there are any", True, _FLAG),
    ParamSpec("train_reader_num_workers", "threads that read ahead", 2, _not_negative, method="TrainReaderNumWorker"),
    ParamSpec("val_reader_num_workers", "the same in validation", 2, _not_negative, method="ValReaderNumWorker"),
    ParamSpec("mp_start_method", "how multiprocessing starts processes in the job", None, _start_method),
)

MODEL_PARAMETERS = (
    ParamSpec("model", "the trained model", is_object=True),
    ParamSpec("history", "losses and metrics of the epochs"),
    ParamSpec("feature_columns", "columns that the model gets", None, _TEXTS),
    ParamSpec("label_columns", "columns of which it predicts others", None, _TEXTS),
    ParamSpec("output_cols", "columns that transform() adds; by default <label>__output", None, _TEXTS),
    ParamSpec("label_kinds", "what the label columns held: int, float, vector or list", None, _TEXTS),
    ParamSpec("run_id", "name of the run in the store", None, _TEXT),
    ParamSpec("batch_size", "rows that are predicted at once", 256, _positive),
)

#: Accepted, with a warning: they tuned a reader of Horovod's that is not needed here.
WITHOUT_EFFECT = (
    "compress_sparse_cols",
    "prefetch_queue_size",
    "reader_pool_type",
    "shuffle_buffer_size",
    "shuffling_buffer_size",
    "tensorflow_dataset_prefetch_buffer_size",
)

_NVTABULAR = "NVTabular's data module is not there; select columns in Spark, and give them as feature_cols"
#: Refused, with what to do instead.
REFUSED = {
    "data_module": f"data_module: {_NVTABULAR}",
    "continuous_cols": f"continuous_cols: {_NVTABULAR}",
    "categorical_cols": f"categorical_cols: {_NVTABULAR}",
}


def with_params(*tables: Sequence[ParamSpec]) -> Callable[[_P], _P]:
    """Return a decorator that gives a class the Params of tables, with ``setName`` and ``getName`` for each."""
    parameters = [parameter for table in tables for parameter in table]

    def decorate(cls: _P) -> _P:
        for parameter in parameters:
            method = parameter.method or "".join(word.capitalize() for word in parameter.name.split("_"))
            param = Param(Params._dummy(), parameter.name, parameter.meaning, _converter(parameter))
            members = {parameter.name: param, f"set{method}": _setter(parameter), f"get{method}": _getter(parameter)}
            for name, member in members.items():
                if name not in vars(cls):
                    setattr(cls, name, member)
        known = {each.name: each for each in getattr(cls, "parameters", ())}
        cls.parameters = tuple({**known, **{each.name: each for each in parameters}}.values())  # type: ignore[attr-defined]
        return cls

    return decorate


def _converter(parameter: ParamSpec) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if value is None or parameter.convert is None:
            return value
        try:
            return parameter.convert(value)
        except ValueError as error:
            raise ArgumentError(f"{parameter.name}: {error}") from None

    return convert


def _setter(parameter: ParamSpec) -> Callable[..., Any]:
    def set_param(self: Params, value: Any) -> Any:
        if value is None:
            self.clear(self.getParam(parameter.name))
            return self
        return self._set(**{parameter.name: value})

    set_param.__doc__ = f"Set ``{parameter.name}``: {parameter.meaning}. None: as by default."
    return set_param


def _getter(parameter: ParamSpec) -> Callable[..., Any]:
    def get_param(self: Params) -> Any:
        return self.getOrDefault(parameter.name)

    get_param.__doc__ = f"Return ``{parameter.name}``: {parameter.meaning}."
    return get_param


class TableParams(Params):
    """Base of classes that `with_params` decorates."""

    parameters: tuple[ParamSpec, ...] = ()

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self._setDefault(**{each.name: each.default for each in self.parameters})
        self.setParams(**given)

    def setParams(self, **given: Any) -> Any:  # noqa: N802 - as in Spark ML
        """Set params by name.

        Raises:
            TypeError: there is no such param, or a value is of another type.
            ArgumentError: (a ValueError) a value makes no sense, or is not possible here.
        """
        return self._set(**self._check_names(given))

    def _check_names(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return params that exist, without those that have no effect, of which one warning tells."""
        names = {each.name for each in self.parameters}
        for name, instead in REFUSED.items():
            if name not in names and given.get(name) is not None:
                raise ArgumentError(instead)
        without_effect = [name for name in sorted(given) if name in WITHOUT_EFFECT and given[name] is not None]
        if without_effect:
            warnings.warn(f"{type(self).__name__}: no effect: {', '.join(without_effect)}", stacklevel=4)
        unknown = sorted(set(given) - names - set(WITHOUT_EFFECT) - set(REFUSED))
        if unknown:
            raise TypeError(f"{type(self).__name__} has no params {unknown}; it has {sorted(names)}")
        return {name: value for name, value in given.items() if name in names and value is not None}
