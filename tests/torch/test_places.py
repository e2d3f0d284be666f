"""Gradients come to their places as they are, whatever their type, layout and kind."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from reigen.api.gradients.bucket_plan import ParameterSpec, plan_buckets
from reigen.torch.reducer.bucket_views import BucketViews

SHAPE = (48, 4, 16, 16)  # large enough for the C library
DTYPES = {torch.float32: "float32", torch.float64: "float64", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@pytest.fixture(params=[1, 2], ids=lambda number: f"{number} threads")
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def place_for(parameter: torch.Tensor, wire: str) -> BucketViews:
    itemsize = 2 if wire.endswith("16") else parameter.itemsize
    plan = plan_buckets([ParameterSpec(parameter.numel(), itemsize, wire)], [0], 1 << 24)
    places = BucketViews([parameter])
    places.lay_out(plan, np.empty(plan.nbytes, np.uint8))
    return places


def gradients_like(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients that autograd, or a user, may leave; all of other numbers than its neighbours."""
    dense = torch.randn(SHAPE).to(parameter.dtype)
    pairs = torch.randn(*SHAPE, dtype=torch.complex128)
    return {
        "contiguous": dense,
        "like the parameter": torch.empty_like(parameter).copy_(dense),
        "transposed": dense.transpose(2, 3),
        "expanded": dense[:1].expand(SHAPE),
        "part of something": torch.cat([dense, dense])[7 : 7 + SHAPE[0]],
        "negated when it is read": pairs.conj().imag,
        "of another type": dense.to(torch.float64),
        "with a graph": dense.clone().requires_grad_(),
        "of a class of its own": torch.nn.Parameter(dense.clone(), requires_grad=False),
    }


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["rows", "channels last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPES.values())
def test_a_gradient_comes_to_its_place(dtype, layout):
    parameter = torch.zeros(SHAPE, dtype=dtype).to(memory_format=layout)
    places = place_for(parameter, DTYPES[dtype])
    place = places.tensors[0]
    assert place is not None
    assert place.stride() == parameter.stride()
    for kind, gradient in gradients_like(parameter).items():
        with torch.no_grad():
            places.fill(0, gradient)
        assert torch.equal(place, gradient.detach().resolve_neg().to(dtype)), kind
        assert places.arrays[0].tobytes() == bytes(place.as_strided((place.numel(),), (1,)).view(torch.uint8).numpy())


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_what_travels_in_another_type_is_converted(wire):
    gradient = torch.randn(SHAPE)
    places = place_for(torch.zeros(SHAPE), wire)
    places.fill(0, gradient)
    assert torch.equal(places.tensors[0], gradient.to(getattr(torch, wire)))


def test_every_bit_of_a_number_that_is_none_arrives():
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for dtype, wire in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16")):
        places = place_for(torch.zeros(1 << 16, dtype=dtype), wire)
        places.fill(0, patterns.view(dtype))
        assert torch.equal(places.tensors[0].view(torch.int16), patterns)
