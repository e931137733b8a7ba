import typing

import pytest

from elastic_train.config.flavors import SHAPES, Flavor


def test_every_flavor_has_a_shape():
    assert set(typing.get_args(Flavor)) == SHAPES.keys()


@pytest.mark.parametrize("flavor", SHAPES)
def test_shapes_are_those_of_the_models(flavor):
    from elastic_train.replica.titan.flavors import model_spec

    model = model_spec(flavor).model
    attention = model.layers[0].attention
    heads = attention.n_heads
    assert SHAPES[flavor] == (len(model.layers), heads, attention.n_kv_heads or heads)
