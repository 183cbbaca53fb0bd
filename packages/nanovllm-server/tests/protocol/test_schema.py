"""Schemas that are too large are refused before the engine gets them."""

import pytest

from nanovllm_server.protocol.error import ApiError
from nanovllm_server.protocol.schema import require_small_schema


def nested(depth):
    schema = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (nested(64), "is nested deeper than 64 levels"),
        ({"enum": ["x" * 300_000]}, "is larger than 256 KiB or 50000 values"),
        ({"enum": list(range(50_000))}, "is larger than 256 KiB or 50000 values"),
    ],
    ids=["deep", "long", "many values"],
)
def test_too_large_schema_is_a_400_of_its_field(schema, problem):
    with pytest.raises(ApiError) as caught:
        require_small_schema(schema, "tools[2].function.parameters")
    assert (caught.value.status, caught.value.code) == (400, "invalid_value")
    assert caught.value.param == "tools[2].function.parameters"
    assert caught.value.message == f"schema at tools[2].function.parameters {problem}"


def test_keywords_of_a_small_schema_are_not_checked():
    require_small_schema({"type": "integr"}, "tools[2].function.parameters")
