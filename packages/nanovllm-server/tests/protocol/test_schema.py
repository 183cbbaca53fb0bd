"""Schemas that can't be enforced are a 400 of their field."""

import pytest

from nanovllm_server.protocol.error import ApiError
from nanovllm_server.protocol.schema import check_schema


@pytest.mark.parametrize(
    ("schema", "place", "code"),
    [
        ({"type": "array", "uniqueItems": True}, "/uniqueItems", "unsupported_schema"),
        ({"type": "integr"}, "/type", "invalid_value"),
    ],
)
def test_schema_that_cannot_be_enforced_is_a_400_of_its_field(schema, place, code):
    with pytest.raises(ApiError) as caught:
        check_schema(schema, "tools[2].function.parameters")
    assert (caught.value.status, caught.value.code) == (400, code)
    assert caught.value.param == "tools[2].function.parameters" + place
    assert caught.value.param in caught.value.message
