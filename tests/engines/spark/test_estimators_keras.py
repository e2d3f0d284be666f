"""KerasEstimator, on two of Keras's backends: driver and Spark's tasks on PyTorch, ranks on that or TensorFlow."""

from __future__ import annotations

import importlib.util
import io
import logging
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

for _name in ("pyspark", "pyarrow", "pandas", "torch", "keras", "tensorflow"):
    if importlib.util.find_spec(_name) is None:  # importing Keras would choose its backend
        reason = f"{_name} is not installed here (pip install 'reigen[spark-estimators,keras,torch,tensorflow]')"
        pytest.skip(reason, allow_module_level=True)


with pytest.MonkeyPatch.context() as _patch:
    _patch.setenv("KERAS_BACKEND", "torch")
    import keras

from pyspark.ml import PipelineModel  # noqa: E402
from pyspark.ml.linalg import Vectors  # noqa: E402
from pyspark.sql import SparkSession  # noqa: E402

from reigen.spark.keras import KerasEstimator, KerasModel  # noqa: E402
from reigen.spark.store import Store  # noqa: E402
from reigen.testing import RankPool  # noqa: E402
from tests.engines.spark.cluster import why_no_spark  # noqa: E402
from tests.engines.spark.local import PoolBackend, local_session  # noqa: E402

pytestmark = [
    pytest.mark.skipif(bool(why_no_spark()), reason=why_no_spark()),
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support:FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # py4j's sockets
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept:DeprecationWarning"
    ),  # Keras's variables
    pytest.mark.filterwarnings("ignore:In the future `np.object`:FutureWarning"),  # TensorFlow's import
]


@pytest.fixture
def no_leaks() -> None:
    """Spark's driver keeps threads, connections and a JVM."""


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with local_session() as session:
        yield session


@pytest.fixture(scope="module", params=[pytest.param("torch", marks=pytest.mark.nightly), "tensorflow"])
def ranks(request: pytest.FixtureRequest) -> Iterator[tuple[str, PoolBackend]]:
    environment = {"KERAS_BACKEND": request.param, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    with RankPool(2, env=environment) as pool:
        yield request.param, PoolBackend(pool)


X = np.random.default_rng(0).normal(size=(41, 2))
Y = X @ [1.0, -2.0] + 0.5
WEIGHTS = np.linspace(0.2, 1.8, 41)


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> Any:
    cells = [
        (i, Vectors.dense(x), float(y), float(w), i % 4 == 0)
        for i, (x, y, w) in enumerate(zip(X, Y, WEIGHTS, strict=True))
    ]
    return spark.createDataFrame(cells, ["id", "x", "y", "w", "v"]).cache()


def linear_model() -> Any:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.set_weights([np.array([[0.3], [-0.4]]), np.array([0.1])])
    return model


def values_of(model: Any) -> Any:
    return np.concatenate([np.asarray(each).reshape(-1) for each in model.get_weights()])


def estimator(tmp_path: Path, ranks: tuple[str, PoolBackend], **given: Any) -> KerasEstimator:
    options = {
        "store": Store.create(str(tmp_path / "store")),
        "backend": ranks[1],
        "backend_env": {"KERAS_BACKEND": ranks[0]},
        "model": linear_model(),
        "optimizer": keras.optimizers.SGD(0.1),
        "loss": "mse",
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 64,
        "partitions_per_process": 2,
        "random_seed": 3,
        "verbose": 0,
    }
    return KerasEstimator(**{**options, **given})


def descend(epochs: int, weights: Any) -> Any:
    found, inputs = np.array([0.3, -0.4, 0.1]), np.column_stack([X, np.ones(41)])
    for _ in range(epochs):
        found -= 0.1 * 2 * inputs.T @ (weights * (inputs @ found - Y)) / 41
    return found


def test_ranks_with_unequal_parts_train_as_one_process_on_all_rows(
    tmp_path: Path, rows: Any, ranks: tuple[str, PoolBackend]
) -> None:
    fitted = estimator(tmp_path, ranks, epochs=3).fit(rows)
    np.testing.assert_allclose(values_of(fitted.keras()), descend(3, np.ones(41)), rtol=1e-5)
    weighted = estimator(tmp_path, ranks, epochs=3, sample_weight_col="w").fit(rows)
    np.testing.assert_allclose(values_of(weighted.keras()), descend(3, WEIGHTS), rtol=1e-5)
    assert len(fitted.getHistory()["loss"]) == 3


def double_error(y_true: Any, y_pred: Any) -> Any:
    return 2 * keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)


def test_a_run_goes_on_with_the_state_of_its_optimizer(
    tmp_path: Path, rows: Any, ranks: tuple[str, PoolBackend]
) -> None:
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise RuntimeError("interrupted")

    def fit(store: str, epochs: int, *callbacks: Any) -> KerasModel:
        options = {
            "optimizer": keras.optimizers.Adam(0.05),
            "metrics": [double_error, keras.metrics.MeanSquaredError(name="m")],
        }
        options |= {"epochs": epochs, "batch_size": 5, "run_id": "r", "validation": "v", "callbacks": list(callbacks)}
        return estimator(tmp_path / store, ranks, **options).fit(rows)

    whole = fit("whole", 4)
    with pytest.raises(Exception, match="interrupted"):
        fit("parts", 4, Interrupt())
    rest = fit("parts", 4)
    np.testing.assert_allclose(values_of(rest.keras()), values_of(whole.keras()), rtol=1e-5)
    history = rest.getHistory()
    assert {"loss", "double_error", "m", "val_loss", "val_double_error", "val_m"} <= set(history)
    assert {len(values) for values in history.values()} == {4}
    errors = (np.column_stack([X, np.ones(41)]) @ values_of(rest.keras()) - Y)[::4]
    np.testing.assert_allclose(history["val_loss"][-1], (errors**2).mean(), rtol=1e-4)
    np.testing.assert_allclose(history["val_double_error"][-1], 2 * abs(errors).mean(), rtol=1e-4)


def test_the_best_model_is_kept_if_that_is_asked_for(tmp_path: Path, rows: Any, ranks: tuple[str, PoolBackend]) -> None:
    best = keras.callbacks.ModelCheckpoint(
        "replaced.keras", monitor="loss", mode="max", save_best_only=True
    )  # the first
    kept = estimator(tmp_path, ranks, epochs=3, run_id="r", checkpoint_callback=best).fit(rows)
    np.testing.assert_allclose(values_of(kept.keras()), descend(1, np.ones(41)), rtol=1e-5)
    store = Store.create(str(tmp_path / "store"))
    with zipfile.ZipFile(io.BytesIO(store.read(store.get_checkpoint_path("r")))) as file:
        assert "model.weights.h5" in file.namelist()


def test_several_inputs_and_outputs_are_predicted_saved_and_loaded(
    tmp_path: Path, rows: Any, ranks: tuple[str, PoolBackend], caplog: pytest.LogCaptureFixture
) -> None:
    x, w = keras.Input((2,)), keras.Input((1,))
    both = keras.layers.Concatenate()([x, w])
    model = keras.Model([x, w], [keras.layers.Dense(1)(both), keras.layers.Dense(41, activation="softmax")(both)])
    options = {"loss": ["mse", "sparse_categorical_crossentropy"], "loss_weights": [0.5, 0.5], "metrics": [["mae"], []]}
    made = estimator(
        tmp_path, ranks, model=model, feature_cols=["x", "w"], label_cols=["y", "id"], batch_size=6, **options
    )
    fitted = made.fit(rows)
    PipelineModel([fitted]).write().overwrite().save(str(tmp_path / "fitted"))
    with caplog.at_level(logging.WARNING):
        again = PipelineModel.load(str(tmp_path / "fitted"))
    assert "pickled" not in caplog.text, "a model without custom objects needs no pickle"
    value, classes = fitted.keras().predict_on_batch([X.astype(np.float32), WEIGHTS.astype(np.float32)[:, None]])
    if ranks[0] == "torch":  # transform() knows nothing of the ranks
        found = again.transform(rows).collect()
        np.testing.assert_allclose([row["y__output"] for row in found], np.asarray(value)[:, 0], rtol=1e-4)
        np.testing.assert_allclose([row["id__output"].toArray() for row in found], np.asarray(classes), rtol=1e-3)


def test_an_estimator_is_saved_and_loaded(tmp_path: Path, spark: SparkSession) -> None:
    options = {
        "optimizer": keras.optimizers.Adam(0.02),
        "loss": keras.losses.Huber(2.0, name="two"),
        "metrics": [double_error],
    }
    store = Store.create(str(tmp_path), storage_options={"auto_mkdir": True})
    made = KerasEstimator(model=linear_model(), store=store, feature_cols=["x"], epochs=7, num_proc=2, **options)
    made.write().overwrite().save(str(tmp_path / "saved"))
    again = KerasEstimator.load(str(tmp_path / "saved"))
    assert (again.getEpochs(), again.getNumProc(), again.getFeatureCols(), again.uid) == (7, 2, ["x"], made.uid)
    assert (type(again.getLoss()), again.getLoss().name) == (keras.losses.Huber, "two")
    assert float(again.getOptimizer().learning_rate) == pytest.approx(0.02)
    np.testing.assert_array_equal(values_of(again.getModel()), values_of(linear_model()))
    assert again.getStore().prefix_path == store.prefix_path
    with pytest.raises(ValueError, match=r"is a reigen.spark.keras.estimator.KerasEstimator, and no"):
        KerasModel.load(str(tmp_path / "saved"))


def test_loss_and_optimizer_may_be_those_of_a_compiled_model(
    tmp_path: Path, rows: Any, ranks: tuple[str, PoolBackend]
) -> None:
    model = linear_model()
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    fitted = estimator(tmp_path, ranks, model=model, optimizer=None, loss=None).fit(rows)
    np.testing.assert_allclose(values_of(fitted.keras()), descend(1, np.ones(41)), rtol=1e-5)
    with pytest.raises(ValueError, match="KerasEstimator needs loss, optimizer"):
        estimator(tmp_path, ranks, optimizer=None, loss=None).fit(rows)
