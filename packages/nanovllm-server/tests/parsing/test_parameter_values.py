import pytest

from nanovllm_server.parsing.parameter_values import to_parameter_json

SCHEMA = {
    "properties": {
        "text": {"type": "string"},
        "number": {"type": "number"},
        "list": {"type": "array"},
        "maybe": {"anyOf": [{"type": "string"}, {"enum": [None]}]},
    }
}


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("text", "12", '"12"'),
        ("text", "null", '"null"'),
        ("maybe", "null", "null"),
        ("maybe", "12", '"12"'),
        ("number", " 12 ", "12"),
        ("number", "1e999", "1e999"),
        ("number", "9" * 5000, "9" * 5000),
        ("number", "NaN", '"NaN"'),
        ("number", "Infinity", '"Infinity"'),
        ("number", "twelve", '"twelve"'),
        ("list", '["\\ud800"]', '["\\ud800"]'),
        ("list", "[" * 5000, '"' + "[" * 5000 + '"'),
    ],
    ids=lambda value: value[:20],
)
def test_text_is_converted_to_the_type_of_the_schema(key, value, expected):
    assert to_parameter_json(value, SCHEMA, key) == expected
