"""Lists the components of a tokenizer: normalizers, pre-tokenizers and decoders."""

import json
from typing import Any


def component_states(component: Any) -> list[dict[str, Any]]:
    """Return the states of a component's parts, as in tokenizer.json; [] for None. Flattens nested sequences.

    Raises an exception of the tokenizers library for a component that is written in Python.
    """
    return [] if component is None else _flatten_sequences(json.loads(component.__getstate__()))


def component_types(component: Any) -> list[str]:
    """Return the types in `component_states`, such as "ByteLevel"."""
    return [state["type"] for state in component_states(component)]


def _flatten_sequences(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    parts = next(value for key, value in state.items() if key != "type")
    return [flat_part for part in parts for flat_part in _flatten_sequences(part)]
