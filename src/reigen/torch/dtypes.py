"""torch's element types and those that travel."""

from __future__ import annotations

import torch

from reigen.types import DTYPES, DType, dtype_named

_TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
#: The element types that travel, by torch's.
DTYPE_OF: dict[torch.dtype, DType] = {_TORCH_DTYPES[name]: dtype for name, dtype in DTYPES.items()}


def dtype_of(dtype: torch.dtype) -> DType:
    """The element type that travels for torch's ``dtype``; raises UnsupportedTypeError if there is none."""
    return DTYPE_OF.get(dtype) or dtype_named(str(dtype).removeprefix("torch."))


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return torch's dtype."""
    return _TORCH_DTYPES[dtype.name]
