"""Parameters stacked by kind: the same values, and the same tokens from a step."""

import jax
import numpy as np
import pytest

from jaxserve.device.packing import Packing
from tests.tiny_programs import make_program, random_params, tiny_config


@pytest.mark.parametrize("tensor", [1, 2])
def test_stacks_layers_by_kind(tensor):
    program = make_program(tiny_config(), tensor=tensor)
    params = program.abstract_model.params
    arrays = random_params(program)
    wanted = [np.asarray(array) for array in arrays]
    packing = Packing.of(params, "gpu")
    kinds = {path.split(".", 2)[-1] for path in params if path.startswith("layers.")}
    outside = [path for path in params if not path.startswith("layers.")]
    assert len(packing.groups) == len(kinds) + len(outside)
    packed = packing.pack(arrays)
    structs = packing.structs(tuple(params.values()))
    for array, struct in zip(packed, structs, strict=True):
        assert array.shape == struct.shape and array.dtype == struct.dtype
        assert array.sharding.is_equivalent_to(struct.sharding, array.ndim)
    assert sum(array.is_deleted() for array in arrays) == len(params) - len(outside), "stacked ones are given up"
    found = jax.jit(packing.unpack)(packed)
    for array, value in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(array, value)


def test_cpus_take_each_parameter_as_it_is():
    program = make_program(tiny_config())
    arrays = random_params(program)
    assert program.packing.groups == tuple((i,) for i in range(len(arrays)))
    assert program.packing.pack(arrays) == arrays
