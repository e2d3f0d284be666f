"""Examples run where their libraries are: `make test-integrations` has PyTorch's, `make test-frameworks` the rest."""

from __future__ import annotations

from pathlib import Path

from tests.needed_libraries import ignore_without

_LIBRARIES = {
    "test_torch_*": ["torchvision", "lightning", "nbclient"],
    "test_keras_*": ["keras", "tensorflow"],
    "test_tensorflow_*": ["tensorflow"],
    "test_jax_*": ["flax", "tensorflow"],
}


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Elsewhere the files are not even imported."""
    verdicts = (
        ignore_without(*modules, path=collection_path, conftest=__file__, pattern=pattern)
        for pattern, modules in _LIBRARIES.items()
    )
    return True if any(verdicts) else None
