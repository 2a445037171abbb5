"""The table of numeric options: each row fits its field and the device, and says which steps have work to do."""

import dataclasses
import pickle

import pytest

from jaxserve import SamplingParams
from jaxserve.api.errors import RequestError
from jaxserve.api.sampling_options import SAMPLING_OPTIONS, Effect, OptionValues, has_effect, neutral_values
from jaxserve.scheduling.plan import Sampling

OTHERS = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.5}
"""Values that are not neutral, where the default below is."""


@pytest.mark.parametrize("name", SAMPLING_OPTIONS)
def test_a_row_fits_its_field_and_the_device(name: str) -> None:
    option = SAMPLING_OPTIONS[name]
    types = {field.name: field.type for field in dataclasses.fields(SamplingParams)}
    assert types[name] is type(option.neutral)
    found = option.check(name, option.neutral)
    assert found == option.neutral and type(found) is type(option.neutral)
    for value in (2**31, -(2**31) - 1) if type(option.neutral) is int else (1e39, -1e39):
        with pytest.raises(RequestError, match=name):
            option.check(name, value)


def test_values_are_neutral_where_not_given() -> None:
    assert OptionValues()._asdict() == {name: option.neutral for name, option in SAMPLING_OPTIONS.items()}
    given = Sampling(OptionValues(top_p=0.5))
    assert pickle.loads(pickle.dumps(given)) == given
    with pytest.raises(TypeError, match="top_q"):
        OptionValues(top_q=0.5)


@pytest.mark.parametrize("name", SAMPLING_OPTIONS)
def test_what_is_not_neutral_has_its_effect_alone(name: str) -> None:
    effect = SAMPLING_OPTIONS[name].effect
    values = OptionValues(**{name: OTHERS.get(name, 1.5)})
    assert [other for other in Effect if has_effect(values, other)] == [effect]
    assert has_effect(values, *Effect) and not has_effect(OptionValues(), *Effect)
    sampling = Sampling(values)
    assert sampling.has_penalties == (effect is Effect.PENALTY)
    assert sampling.changes_logits == (effect is not Effect.DRAW)


def test_a_greedy_request_draws_nothing() -> None:
    params = SamplingParams(**{**OTHERS, "temperature": 0})
    assert {name: getattr(params, name) for name in OTHERS} == neutral_values(Effect.DRAW)
