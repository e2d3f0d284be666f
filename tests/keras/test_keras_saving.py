"""Models that are saved with a DistributedOptimizer load without Reigen, and with it go on where they were."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import reigen.keras as hvd
from tests.keras import keras_models as models

_LOAD_PLAINLY = """
import sys
import keras
for path in sys.argv[1:]:
    model = keras.saving.load_model(path)
    assert "reigen" not in sys.modules
    print(type(model.optimizer).__name__, len(model.optimizer.variables), int(model.optimizer.iterations.numpy()))
"""


def save(path: str, passes: int) -> tuple[int, int]:
    model = models.make_model(1)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), backward_passes_per_step=passes)
    model.compile(optimizer=optimizer, loss="mse")
    models.fit(model, *hvd.shard(*models.make_data()), 4)
    if hvd.rank() == 0:
        model.save(path)
    hvd.barrier()
    return len(optimizer._saved_variables()), int(keras.ops.convert_to_numpy(optimizer._iterations))


def test_saved_models_load_without_reigen(keras_pools, keras_backend, tmp_path):
    paths, expected = [], []
    for passes in (1, 2):
        paths.append(str(tmp_path / f"{passes} passes.keras"))
        saved = keras_pools(2).run(save, paths[-1], passes, init=True)[0]
        expected += ["Adam", *map(str, saved)]
    environment = {**os.environ, "KERAS_BACKEND": keras_backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", _LOAD_PLAINLY, *paths]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=100)
    assert output.stdout.split()[-6:] == expected


def go_on(path: str) -> tuple[bytes, bytes, str]:
    """Train two epochs, with the model saved and loaded between them, and without."""
    data = hvd.shard(*models.make_data())
    model = models.make_model(1)
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    models.fit(model, *data, 4)
    if hvd.rank() == 0:
        model.save(path)
    hvd.barrier()
    models.fit(model, *data, 4)
    loaded = hvd.load_model(path)
    models.fit(loaded, *data, 4)
    return models.bits(model), models.bits(loaded), type(loaded.optimizer).__name__


def test_load_model_goes_on_where_the_saved_one_was(keras_pools, tmp_path):
    results = keras_pools(2).run(go_on, str(tmp_path / "model.keras"), init=True)
    assert results[0] == results[1]
    trained, loaded, name = results[0]
    assert trained == loaded
    assert name == "Adam"


def load_horovods(path: str, registered: str) -> tuple[str, int]:
    """Keras has written down that the class of the optimizer is Horovod's."""
    model = models.make_model(1)
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    models.fit(model, *models.make_data(), 4)
    model.save(f"{path}/plain.keras")
    with zipfile.ZipFile(f"{path}/plain.keras") as plain, zipfile.ZipFile(f"{path}/horovods.keras", "w") as horovods:
        for name in plain.namelist():
            data = plain.read(name)
            if name == "config.json":
                config = json.loads(data)
                config["compile_config"]["optimizer"] |= {"module": "horovod._keras", "registered_name": registered}
                data = json.dumps(config).encode()
            horovods.writestr(name, data)
    loaded = hvd.load_model(f"{path}/horovods.keras")
    assert models.bits(loaded) == models.bits(model)
    models.fit(loaded, *models.make_data(), 4)
    return type(loaded.optimizer).__name__, int(keras.ops.convert_to_numpy(loaded.optimizer.iterations))


@pytest.mark.parametrize("registered", ["Adam", "Custom>Adam"])
def test_a_model_that_horovod_saved(keras_pools, tmp_path, registered):
    steps = 2 * models.ROWS // 4
    assert keras_pools(1).run(load_horovods, str(tmp_path), registered, init=True) == [("Adam", steps)]


class HalfSGD(keras.optimizers.SGD):
    """Of a user's own."""


def load_of_own_class(path: str, registered: bool) -> tuple[str, list[Any]]:
    cls = keras.saving.register_keras_serializable("mine")(HalfSGD) if registered else HalfSGD
    model = models.make_model(1)
    model.compile(optimizer=hvd.DistributedOptimizer(cls(0.01, momentum=0.5)), loss="mse")
    models.fit(model, *hvd.shard(*models.make_data()), 4)
    if hvd.rank() == 0:
        model.save(path)
    hvd.barrier()
    loaded = hvd.load_model(path) if registered else hvd.load_model(path, custom_optimizers=[HalfSGD])
    assert isinstance(loaded.optimizer, HalfSGD)
    values = [keras.ops.convert_to_numpy(each) for each in loaded.optimizer.variables]
    saved = [keras.ops.convert_to_numpy(each) for each in model.optimizer.variables]
    return type(loaded.optimizer).__name__, [bool(np.array_equal(*pair)) for pair in zip(values, saved, strict=True)]


@pytest.mark.parametrize("registered", [False, True])
def test_an_optimizer_of_ones_own(keras_pools, tmp_path, registered):
    for name, equal in keras_pools(2).run(load_of_own_class, str(tmp_path / "model.keras"), registered, init=True):
        assert name == "HalfSGD"
        assert all(equal)


def weights_only(path: str) -> bool:
    model = models.make_model(1)
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    models.fit(model, *hvd.shard(*models.make_data()), 4)
    if hvd.rank() == 0:
        model.save_weights(path)
    hvd.barrier()
    plain = models.make_model(2)
    plain.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    plain.load_weights(path)
    return models.bits(plain) == models.bits(model)


def test_weights(keras_pools, tmp_path):
    assert keras_pools(2).run(weights_only, str(Path(tmp_path) / "model.weights.h5"), init=True) == [True, True]
