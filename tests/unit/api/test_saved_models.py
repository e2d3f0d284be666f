"""What the files of Keras's models say of their optimizers."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from types import SimpleNamespace

from reigen.api.saved_models import find_horovods, read_optimizer

ADAM, LOSS_SCALE = type("Adam", (), {}), type("LossScaleOptimizer", (), {})
KERAS = SimpleNamespace(Adam=ADAM, LossScaleOptimizer=LOSS_SCALE, serialize=len)


def horovods(name: str, **more: object) -> dict[str, object]:
    return {"module": "horovod._keras", "class_name": name, "config": {}, **more}


def test_optimizers_that_horovod_had_wrapped() -> None:
    assert find_horovods(horovods("Adam"), KERAS) == {"Adam": ADAM}
    assert find_horovods(horovods("Adam", registered_name="Custom>Adam"), KERAS) == {"Adam": ADAM, "Custom>Adam": ADAM}
    scaled = {"module": "keras.optimizers", "class_name": "LossScaleOptimizer"}
    assert find_horovods({**scaled, "config": {"inner_optimizer": horovods("Adam")}}, KERAS) == {"Adam": ADAM}


def test_all_others_are_keras_matter() -> None:
    for other in ({}, horovods("Mine"), horovods("serialize"), {"module": "keras.optimizers", "class_name": "Adam"}):
        assert find_horovods(other, KERAS) == {}


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    assert read_optimizer(path) == {}
    path.write_bytes(b"\x89HDF")
    assert read_optimizer(path) == {}
    for config, expected in (
        ({"compile_config": {"optimizer": horovods("Adam")}}, horovods("Adam")),
        ({"compile_config": {"optimizer": "adam"}}, {}),
        ({"compile_config": None}, {}),
    ):
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("config.json", json.dumps(config))
        assert read_optimizer(path) == expected
