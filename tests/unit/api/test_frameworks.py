"""The table of frameworks, and the packages that there are."""

from __future__ import annotations

from pathlib import Path

import reigen
from reigen.api.frameworks import FRAMEWORKS

ROOT = Path(reigen.__file__).parent


def test_every_package_with_an_adapter_is_in_the_table() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/adapter.py")} - {"api"}  # where the base class is
    assert packages == set(FRAMEWORKS)
    for name, adapter in FRAMEWORKS.items():  # which may not be installed
        assert f"\nclass {adapter}(" in (ROOT / name / "adapter.py").read_text()
