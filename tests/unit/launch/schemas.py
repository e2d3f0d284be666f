"""Kubernetes' own schemas, as the package kubernetes-validate has them."""

from __future__ import annotations

from typing import Any

import pytest

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
#: The oldest that documentation names, and the newest that there is.
VERSIONS = [f"1.{minor}" for minor in range(25, int(kubernetes_validate.latest_version().split(".")[1]) + 1)]


def check_schema(manifest: dict[str, Any]) -> None:
    """Fails where a version has a field not, or not so."""
    for version in VERSIONS:
        kubernetes_validate.validate(manifest, version, strict=True)
