"""JSON schemas within the size limits that are costly to convert or compile."""

import json

from hostile_cases import ANY, UNIQUE, VALID_BODY, Case, post, tool


def make_cost_cases() -> list[Case]:
    schemas = make_costly_schemas()
    requests = {name: {"structured_outputs": {"json": schema}} for name, schema in schemas.items()}
    for name in ("1,500 optional properties", "100 KB of different nested objects"):
        # The prompt contains the tool. Truncate the prompt to fit the context.
        requests[f"{name} of a tool"] = {
            **tool(schemas[name]),
            "tool_choice": "required",
            "truncate_prompt_tokens": 64,
        }
    return [
        Case(f"cost: {name}", post(json.dumps({**VALID_BODY, **request}).encode()), ANY)
        for name, request in requests.items()
    ]


def make_costly_schemas() -> dict[str, dict]:
    """Each schema contains UNIQUE."""
    string = {"type": "string"}
    properties = {f"{UNIQUE} {i}": string for i in range(1_500)}
    overlapping_objects = [
        {"type": "object", "properties": {"a": {}, f"{UNIQUE} {i}": {"type": "integer"}}, "required": [f"{UNIQUE} {i}"]}
        for i in range(200)
    ]
    bounded_strings = {f"{UNIQUE} {i}": {**string, "minLength": i, "maxLength": 100 + i} for i in range(100)}
    return {
        "200 overlapping objects": {"oneOf": overlapping_objects},
        "200 overlapping patterns": {"oneOf": [{**string, "pattern": f"^{UNIQUE}a{i}"} for i in range(200)]},
        "200 overlapping lengths": {"title": UNIQUE, "oneOf": [{**string, "minLength": i} for i in range(200)]},
        "a const with a long pattern": {"title": UNIQUE, "const": "a" * 5000, "pattern": "(?=a*b)" * 500},
        "a const with a pattern of 16 KB": {
            "title": UNIQUE,
            "const": "a" * 2000,
            "pattern": "^" + "(a?b?c?)" * 2000 + "$",
        },
        "100 KB of equal nested objects": {
            "type": "object",
            "properties": {f"{UNIQUE} {i}": make_nested_objects(18, "") for i in range(60)},
        },
        "100 KB of different nested objects": {
            "type": "object",
            "properties": {f"branch {i}": make_nested_objects(18, f"{UNIQUE} {i}") for i in range(28)},
        },
        "100 bounded strings": {"type": "object", "properties": bounded_strings},
        "100 required bounded strings": {
            "type": "object",
            "properties": bounded_strings,
            "required": [*bounded_strings],
            "additionalProperties": False,
        },
        "2,000 long enum values": {"enum": [f"{UNIQUE} {i} {'x' * 100}" for i in range(2_000)]},
        "1,500 optional properties": {"type": "object", "properties": properties, "additionalProperties": False},
        "1,500 required properties": {
            "type": "object",
            "properties": properties,
            "required": [*properties],
            "additionalProperties": False,
        },
    }


def make_nested_objects(depth: int, suffix: str) -> dict:
    leaf = {"type": "string"}
    if depth == 0:
        return leaf
    a, b, c = (f"{name}{depth} {suffix}" if suffix else name for name in "abc")
    properties = {a: make_nested_objects(depth - 1, suffix), b: leaf, c: leaf}
    return {"type": "object", "properties": properties, "required": [a], "additionalProperties": False}
