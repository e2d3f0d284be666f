"""Manifests in the documentation are such that Kubernetes takes them, and that Reigen reads what they set."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from reigen.cli.run_options import make_parser
from tests.unit.launch.schemas import check_schema

DOCS = Path(__file__).parents[3] / "docs"
MANIFESTS = [
    manifest
    for page in sorted(DOCS.glob("*.md"))
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    for manifest in yaml.safe_load_all(block)
    if isinstance(manifest, dict) and "kind" in manifest
]


def containers(node: Any) -> list[dict[str, Any]]:
    """All containers anywhere in a manifest."""
    if isinstance(node, list):
        return [found for each in node for found in containers(each)]
    if not isinstance(node, dict):
        return []
    return [*node.get("containers", []), *(found for each in node.values() for found in containers(each))]


def test_there_are_manifests() -> None:
    assert {each["kind"] for each in MANIFESTS} >= {"Job", "Service", "ClusterTrainingRuntime", "MPIJob"}


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda each: each["kind"])
def test_manifests(manifest: dict[str, Any]) -> None:
    if manifest["kind"] in {"ClusterTrainingRuntime", "MPIJob"}:  # no schemas: their pods are looked at
        for container in containers(manifest):
            check_schema({"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [container]}})
    else:
        check_schema(manifest)
    for container in containers(manifest):
        if command := container.get("command"):
            assert command[:2] == ["reigen", "run"]
            assert make_parser().parse_args(command[2:]).command == ["python", "train.py"]
