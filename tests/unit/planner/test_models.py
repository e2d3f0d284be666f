"""Built-in models: totals against what is published, and times against arithmetic done by hand."""

from __future__ import annotations

import pytest

from reigen.errors import ArgumentError
from reigen.planner.models import MODELS, built_in_profile
from reigen.planner.profile import make_profile


@pytest.mark.parametrize(
    ("name", "parameters", "tensors"),
    [
        ("resnet50", 25_557_032, 161),
        ("vgg16", 138_357_544, 32),
        # Of transformers' BertForPreTraining: 391 of BertModel with its pooler, and 7 of the heads.
        ("bert-large", 336_226_108, 398),
    ],
)
def test_models_have_the_published_numbers_of_parameters(name: str, parameters: int, tensors: int) -> None:
    profile = built_in_profile(name)
    assert sum(tensor.elements for tensor in profile.tensors) == parameters
    assert len(profile.tensors) == tensors
    assert len({tensor.name for tensor in profile.tensors}) == tensors


def test_bert_without_its_heads_is_what_others_count() -> None:
    assert (
        sum(layer.elements for layer in MODELS["bert-large"].layers if "cls." not in layer.shapes[0][0]) == 335_141_888
    )


@pytest.mark.parametrize(
    ("name", "multiply_adds"),
    [
        ("resnet50", 3.8e9),  # He et al., table 1
        ("vgg16", 15.5e9),  # 15.3e9 in the convolutions, 0.124e9 in the fully connected layers
        # 24 layers of 12 x 1024^2 and 2 x 128 x 1024 for 128 word pieces, and 20 words decoded
        ("bert-large", 24 * 128 * (12 * 1024**2 + 2 * 128 * 1024) + 20 * 1024 * 30522),
    ],
)
def test_arithmetic_of_a_sample(name: str, multiply_adds: float) -> None:
    assert MODELS[name].forward_flops / 2 == pytest.approx(multiply_adds, rel=0.025)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_come_from_the_last_layer_to_the_first(name: str) -> None:
    profile = built_in_profile(name, flops=1e12)
    ready = [tensor.ready_seconds for tensor in profile.tensors]
    assert ready == sorted(ready, reverse=True)
    assert ready[0] == pytest.approx(profile.backward_seconds)
    assert 0 < ready[-1] < profile.backward_seconds / 50
    assert profile.backward_seconds == pytest.approx(2 * MODELS[name].forward_flops * profile.batch / 1e12)


def test_most_bytes_of_vgg_come_before_its_arithmetic() -> None:
    profile = built_in_profile("vgg16")
    early = [tensor for tensor in profile.tensors if tensor.ready_seconds < 0.02 * profile.backward_seconds]
    assert sum(tensor.elements for tensor in early) == 123_642_856  # the three fully connected layers


def test_a_known_speed_is_the_speed_of_a_rank_alone() -> None:
    profile = built_in_profile("resnet50", 360.0, batch=256)
    assert profile.batch / profile.step_seconds == pytest.approx(360.0)
    assert profile.backward_seconds == pytest.approx(2 * profile.forward_seconds)


def test_a_profile_may_be_written_and_read() -> None:
    profile = built_in_profile("bert-large", dtype="float16")
    assert make_profile(profile.to_json(), "bert.json") == profile


@pytest.mark.parametrize(
    ("arguments", "options"),
    [(("alexnet",), {}), (("vgg16", 0.0), {}), (("vgg16",), {"flops": 0.0}), (("vgg16",), {"batch": -1})],
)
def test_what_cannot_be_is_an_error(arguments: tuple[object, ...], options: dict[str, object]) -> None:
    with pytest.raises(ArgumentError):
        built_in_profile(*arguments, **options)  # type: ignore[arg-type]
