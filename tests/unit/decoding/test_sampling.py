"""Sampling refuses numbers that make no distribution, for callers from Python as well."""

import math

import pytest

from blockdraft.config import ConfigError
from blockdraft.decoding.sampling import Sampling


@pytest.mark.parametrize("temperature", [-0.1, math.nan, math.inf])
def test_a_temperature_is_a_finite_number_from_0_up(temperature: float) -> None:
    with pytest.raises(ConfigError, match=f"expected a finite temperature >= 0, .* got {temperature}, 1.0 and 0"):
        Sampling(temperature=temperature)
