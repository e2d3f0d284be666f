"""Manifests as YAML: templates of users, and what is shown to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reigen.errors import ConfigError


def read_template(path: Path) -> dict[str, Any]:
    """Read the one document of a YAML file.

    Raises:
        ConfigError: it cannot be read, or has something else.
    """
    import yaml

    try:
        documents = [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each is not None]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--kube-worker-template {path}: cannot be read: {reason}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--kube-worker-template {path}: no YAML: {error}") from None
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise ConfigError(f"--kube-worker-template {path}: it must have one document, an object")
    return documents[0]


def dump_manifests(manifests: Sequence[dict[str, Any]]) -> str:
    """Return the text of manifests, a document each, in the order of their keys."""
    import yaml

    text: str = yaml.safe_dump_all(manifests, sort_keys=False, explicit_start=True)
    return text
