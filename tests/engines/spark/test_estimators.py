"""Estimators of Spark ML: what they train is what one process would, on all rows, and what Spark can do with it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

for _name in ("pyspark", "pyarrow", "pandas", "torch"):
    pytest.importorskip(_name, reason=f"{_name} is not installed here (pip install 'reigen[spark-estimators,torch]')")

import torch  # noqa: E402
from pyspark.ml import Pipeline, PipelineModel  # noqa: E402
from pyspark.ml.feature import StringIndexer, VectorAssembler  # noqa: E402
from pyspark.ml.linalg import Vectors  # noqa: E402
from pyspark.sql import SparkSession  # noqa: E402

from reigen.spark.estimator_backend import LocalBackend, SparkBackend  # noqa: E402
from reigen.spark.store import Store  # noqa: E402
from reigen.spark.torch import TorchEstimator, TorchModel  # noqa: E402
from reigen.testing import PoolCache  # noqa: E402
from tests.engines.spark.cluster import why_no_spark  # noqa: E402
from tests.engines.spark.local import PoolBackend, local_session  # noqa: E402

pytestmark = [
    pytest.mark.skipif(bool(why_no_spark()), reason=why_no_spark()),
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support:FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # py4j's sockets
]


@pytest.fixture
def no_leaks() -> None:
    """Spark's driver keeps threads, connections and a JVM."""


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with local_session() as session:
        yield session


@pytest.fixture
def backend(pools: PoolCache) -> Callable[[int], PoolBackend]:
    return lambda size: PoolBackend(pools.get(size))


X = np.random.default_rng(0).normal(size=(41, 2))
Y = X @ [1.0, -2.0] + 0.5
WEIGHTS = np.linspace(0.2, 1.8, 41)


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> Any:
    """41 rows, which neither two nor three ranks can divide equally."""
    cells = [
        (i, Vectors.dense(x), float(y), float(w), i % 4 == 0)
        for i, (x, y, w) in enumerate(zip(X, Y, WEIGHTS, strict=True))
    ]
    return spark.createDataFrame(cells, ["id", "x", "y", "w", "v"]).cache()


def linear_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Linear(2, 1)


def descend(model: torch.nn.Module, epochs: int, weights: np.ndarray, rate: float = 0.1) -> np.ndarray:
    """Gradient descent on all rows at once, in float64: the weights and the bias afterwards."""
    found = np.append(model.weight.detach().numpy()[0], model.bias.item()).astype(np.float64)
    inputs = np.column_stack([X, np.ones(len(X))])
    for _ in range(epochs):
        found -= rate * 2 * inputs.T @ (weights * (inputs @ found - Y)) / len(X)
    return found


def values_of(model: torch.nn.Module) -> np.ndarray:
    return np.append(model.weight.detach().numpy()[0], model.bias.item())


def torch_estimator(tmp_path: Path, backend: Any, **given: Any) -> TorchEstimator:
    model = given.pop("model", None) or linear_model()
    options = {
        "store": Store.create(str(tmp_path / "store")),
        "backend": backend,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss": torch.nn.functional.mse_loss,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 64,
        "partitions_per_process": 2,
        "random_seed": 3,
        "verbose": 0,
    }
    return TorchEstimator(**{**options, **given})


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_with_unequal_parts_train_as_one_process_on_all_rows(
    tmp_path: Path, rows: Any, backend: Callable[[int], PoolBackend], size: int
) -> None:
    model = linear_model()
    fitted = torch_estimator(tmp_path, backend(size), model=model, epochs=3).fit(rows)
    np.testing.assert_allclose(values_of(fitted.getModel()), descend(model, 3, np.ones(41)), rtol=1e-5)
    assert values_of(model).tolist() == values_of(linear_model()).tolist(), "the user's model stays as it is"
    weighted = torch_estimator(tmp_path, backend(size), sample_weight_col="w", epochs=3).fit(rows)
    np.testing.assert_allclose(values_of(weighted.getModel()), descend(model, 3, WEIGHTS), rtol=1e-5)
    assert len(fitted.getHistory()) == 3


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_row_of_a_dataframe_is_used_once_an_epoch(
    tmp_path: Path, rows: Any, backend: Callable[[int], PoolBackend], size: int
) -> None:
    class First(torch.nn.Linear):
        def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    def step(model: Any, optimizer: Any, transform: Any, loss_fn: Any, inputs: Any, labels: Any, weights: Any) -> Any:
        import reigen.torch as hvd

        with (tmp_path / f"used.{hvd.rank()}").open("a") as file:
            file.write(" ".join(str(int(number)) for number in inputs[1]) + "\n")
        optimizer.zero_grad()
        outputs, labels = transform(model(*inputs), labels)
        loss = loss_fn(outputs, labels, weights)
        loss.backward()
        optimizer.step()
        return outputs, loss

    estimator = torch_estimator(
        tmp_path, backend(size), model=First(2, 1), train_minibatch_fn=step, batch_size=4, epochs=2
    )
    estimator.setFeatureCols(["x", "id"]).setInputShapes([[-1, 2], [-1]]).fit(rows)
    steps = [(tmp_path / f"used.{rank}").read_text().splitlines() for rank in range(size)]
    half = len(steps[0]) // 2
    assert {len(each) for each in steps} == {2 * half}
    for epoch in (slice(0, half), slice(half, None)):
        used = Counter(int(number) for each in steps for line in each[epoch] for number in line.split())
        assert used == Counter(range(41))


def test_validation_is_of_all_its_rows(tmp_path: Path, rows: Any, backend: Callable[[int], PoolBackend]) -> None:
    absolute = torch.nn.functional.l1_loss
    estimator = torch_estimator(tmp_path, backend(2), validation="v", metrics=[absolute], val_batch_size=3, epochs=2)
    fitted = estimator.fit(rows)
    weight, bias = values_of(fitted.getModel())[:2], values_of(fitted.getModel())[2]
    errors = (X @ weight + bias - Y)[::4]
    found = fitted.getHistory()[-1]["validation"]
    np.testing.assert_allclose(
        [found["loss"], found["all_metrics"][0][0]], [(errors**2).mean(), abs(errors).mean()], rtol=1e-5
    )
    shared = torch_estimator(tmp_path, backend(2), validation=0.3).fit(rows)
    assert set(shared.getHistory()[0]) == {"epoch", "train", "validation"}


def test_a_run_goes_on_where_it_was_interrupted(
    tmp_path: Path, rows: Any, backend: Callable[[int], PoolBackend]
) -> None:
    def fit(store: str, epochs: int, *, fail_after: int | None = None) -> TorchModel:
        def callback(epoch: int, record: Any) -> None:
            if epoch == fail_after:
                raise RuntimeError("interrupted")

        model = linear_model()
        options = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), "callbacks": [callback]}
        return torch_estimator(
            tmp_path / store, backend(2), model=model, epochs=epochs, batch_size=5, run_id="r", **options
        ).fit(rows)

    whole = fit("whole", 4)
    with pytest.raises(Exception, match="interrupted"):
        fit("parts", 4, fail_after=1)
    rest = fit("parts", 4)
    assert [record["epoch"] for record in rest.getHistory()] == [0, 1, 2, 3]
    np.testing.assert_array_equal(values_of(rest.getModel()), values_of(whole.getModel()))
    more = fit("parts", 2)
    assert [record["epoch"] for record in more.getHistory()] == [0, 1, 2, 3, 4, 5]
    store = Store.create(str(tmp_path / "parts" / "store"))
    assert torch.load(store.local_path(store.get_checkpoint_path("r")), weights_only=True)["progress"]["done"] == 6
    assert len(json.loads(store.read(store.get_logs_path("r") + "/history.json"))) == 6


class TwoHeads(torch.nn.Module):
    """Two inputs, a number and classes."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.classes = torch.nn.Linear(2, 1), torch.nn.Linear(3, 4)

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.value(x), self.classes(torch.cat([x, w], 1))


def cross_entropy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output, label.long())


def test_a_pipeline_of_several_inputs_and_outputs_is_saved_and_loaded(
    tmp_path: Path, spark: SparkSession, backend: Callable[[int], PoolBackend]
) -> None:
    cells = [
        (float(x[0]), float(x[1]), float(w), float(y), "abcd"[i % 4])
        for i, (x, y, w) in enumerate(zip(X, Y, WEIGHTS, strict=True))
    ]
    frame = spark.createDataFrame(cells, ["x1", "x2", "w", "y", "kind"])
    model = TwoHeads()
    estimator = torch_estimator(
        tmp_path,
        backend(2),
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        loss=[torch.nn.functional.mse_loss, cross_entropy],
        loss_weights=[0.75, 0.25],
        metrics=[[torch.nn.functional.l1_loss], []],
        feature_cols=["x", "w"],
        label_cols=["y", "number"],
        batch_size=8,
    )
    stages = [
        VectorAssembler(inputCols=["x1", "x2"], outputCol="x"),
        StringIndexer(inputCol="kind", outputCol="number"),
    ]
    pipeline = Pipeline(stages=[*stages, estimator])
    pipeline.write().overwrite().save(str(tmp_path / "pipeline"))
    loaded = Pipeline.load(str(tmp_path / "pipeline"))
    assert loaded.getStages()[-1].getLossWeights() == [0.75, 0.25]
    loaded.getStages()[-1].setBackend(backend(2))
    fitted = loaded.fit(frame)
    record = fitted.stages[-1].getHistory()[0]["train"]
    assert [len(group) for group in record["all_metrics"]] == [1, 0]
    fitted.write().overwrite().save(str(tmp_path / "fitted"))
    again = PipelineModel.load(str(tmp_path / "fitted"))
    again.stages[-1].setOutputCols(["value", "classes"])
    found = again.transform(frame).collect()
    inputs = torch.tensor(X).float(), torch.tensor(WEIGHTS).float()[:, None]
    value, classes = (output.detach().numpy() for output in fitted.stages[-1].getModel()(*inputs))
    np.testing.assert_allclose([row["value"] for row in found], value[:, 0], rtol=1e-5)
    np.testing.assert_allclose([row["classes"].toArray() for row in found], classes, rtol=1e-4, atol=1e-6)
    assert found[0].__fields__ == ["x1", "x2", "w", "y", "kind", "x", "number", "value", "classes"]


def test_parquet_files_of_the_users_with_a_transformation(
    tmp_path: Path, rows: Any, backend: Callable[[int], PoolBackend]
) -> None:
    def transform(frame: Any) -> Any:
        frame["both"] = [np.append(x, w) for x, w in zip(frame["x"], frame["w"], strict=True)]
        return frame

    data = str(tmp_path / "mine")
    rows.drop("v").write.parquet(data)
    store = Store.create(str(tmp_path / "store"), train_path=data, val_path=data)
    estimator = torch_estimator(
        tmp_path,
        backend(2),
        store=store,
        model=torch.nn.Linear(3, 1),
        feature_cols=["both"],
        transformation_fn=transform,
    )
    fitted = estimator.setInMemoryCacheAll(True).setTrainStepsPerEpoch(5).setEpochs(2).fit_on_parquet()
    assert [set(record) for record in fitted.getHistory()] == [{"epoch", "train", "validation"}] * 2
    with pytest.raises(ValueError, match="there are no Parquet files in"):
        estimator.fit_on_parquet(dataset_idx=7)


def test_rows_are_written_once_and_removed_with_the_dataframe(
    tmp_path: Path, rows: Any, backend: Callable[[int], PoolBackend]
) -> None:
    frame = rows.select("x", "y")
    estimator = torch_estimator(tmp_path, backend(1))
    estimator.fit(frame)
    kept = [each.name for each in (tmp_path / "store").glob("intermediate_*")]
    estimator.setEpochs(2).fit(frame)
    assert [each.name for each in (tmp_path / "store").glob("intermediate_*")] == kept != []
    del frame
    assert not [*(tmp_path / "store").glob("intermediate_*")]


def test_integers_are_predicted_as_integers(tmp_path: Path, rows: Any, spark: SparkSession) -> None:
    model = TorchModel(model=linear_model(), feature_columns=["x"], label_columns=["id"], label_kinds=["int"])
    found = model.transform(rows)
    assert dict(found.dtypes)["id__output"] == "bigint"
    outputs = linear_model()(torch.tensor(X).float()).detach().numpy()[:, 0]
    assert [row["id__output"] for row in found.collect()] == [round(float(each)) for each in outputs]
    assert model.transform(rows.limit(0)).columns == found.columns


def test_gradients_of_several_batches_are_added_up(
    tmp_path: Path, rows: Any, backend: Callable[[int], PoolBackend]
) -> None:
    even = rows.filter("id < 40")
    options = {"backward_passes_per_step": 2, "batch_size": 10, "shuffle": False}
    fitted = torch_estimator(tmp_path, backend(2), **options).fit(even)
    model = linear_model()
    inputs, start = np.column_stack([X, np.ones(41)])[:40], values_of(model).astype(np.float64)
    truth = start - 0.1 * 2 * 2 * inputs.T @ (inputs @ start - Y[:40]) / 40  # two means of 20 rows are added up
    np.testing.assert_allclose(values_of(fitted.getModel()), truth, rtol=1e-5)


def test_what_cannot_be_trained_on_is_said_before_anything_starts(
    tmp_path: Path, rows: Any, spark: SparkSession
) -> None:
    estimator = torch_estimator(tmp_path, LocalBackend(50))
    with pytest.raises(ValueError, match="41 rows are fewer than the 50 processes"):
        estimator.fit(rows)
    with pytest.raises(ValueError, match=r"has no columns \['nothing'\]; it has"):
        estimator.copy().setFeatureCols(["nothing"]).fit(rows)
    with pytest.raises(ValueError, match=r"columns without numbers cannot be trained on: t \(string\)"):
        estimator.copy().setFeatureCols(["t"]).fit(spark.createDataFrame([("a", 1.0)], ["t", "y"]))
    with pytest.raises(ValueError, match="has no column 'nothing'"):
        estimator.copy().setValidation("nothing").fit(rows)
    with pytest.raises(ValueError, match="parameters that are not the model's"):
        estimator.copy().setBackend(LocalBackend(1)).setModel(linear_model()).fit(rows)
    with pytest.raises(ValueError, match="TorchEstimator needs store, model, optimizer, feature_cols, label_cols"):
        TorchEstimator().fit(rows)


def test_a_model_needs_an_output_for_each_label(
    tmp_path: Path, rows: Any, backend: Callable[[int], PoolBackend]
) -> None:
    with pytest.raises(Exception, match="the model has 1 outputs, but 2 labels: y, w; one for each"):
        torch_estimator(tmp_path, backend(2), label_cols=["y", "w"]).fit(rows)


def test_an_estimator_trains_on_sparks_own_tasks(tmp_path: Path, rows: Any) -> None:
    model = linear_model()
    estimator = torch_estimator(tmp_path, SparkBackend(2, verbose=0), model=model, epochs=3)
    np.testing.assert_allclose(values_of(estimator.fit(rows).getModel()), descend(model, 3, np.ones(41)), rtol=1e-5)


def test_params_have_setters_and_getters_and_defaults() -> None:
    estimator = TorchEstimator(epochs=3, batch_size=None, feature_cols=["a"])
    assert (estimator.getEpochs(), estimator.getBatchSize(), estimator.getPartitionsPerProcess()) == (3, 32, 10)
    assert estimator.setEpochs(5).setTrainReaderNumWorker(4).setValReaderNumWorker(1).getEpochs() == 5
    assert (estimator.getTrainReaderNumWorker(), estimator.setEpochs(None).getEpochs()) == (4, 1)
    assert "epochs: number of epochs" in estimator.explainParams()
    assert estimator.copy({estimator.epochs: 9}).getEpochs() == 9


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"backend": SparkBackend(1), "num_proc": 2}, ValueError, "backend and num_proc"),
        ({"loss": print, "loss_constructors": print}, ValueError, "loss and loss_constructors"),
        ({"data_module": "petastorm"}, ValueError, "data_module: NVTabular's data module is not there"),
        ({"continuous_cols": ["a"]}, ValueError, "give them as feature_cols"),
        ({"categorical_cols": ["a"]}, ValueError, "give them as feature_cols"),
        ({"epochs": 0}, ValueError, "epochs: must be at least 1, got 0"),
        ({"validation": 1.5}, ValueError, "validation: must be a share of the rows between 0 and 1"),
        ({"mp_start_method": "thread"}, ValueError, "mp_start_method: must be fork, spawn or forkserver"),
        ({"epochs": "many"}, TypeError, "epochs"),
        ({"input_shapes": [3]}, TypeError, "input_shapes"),
        ({"epoch": 3}, TypeError, r"TorchEstimator has no params \['epoch'\]"),
    ],
)
def test_params_that_make_no_sense_are_errors(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TorchEstimator(**given)


def test_params_of_a_reader_that_is_not_needed_are_one_warning() -> None:
    with pytest.warns(UserWarning, match="no effect: reader_pool_type, shuffle_buffer_size") as caught:
        TorchEstimator(reader_pool_type="process", shuffle_buffer_size=10, epochs=2)
    assert len(caught) == 1
