"""Describes grammars, and defines the interfaces of compiled grammars, which `grammar/` implements."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray


class GrammarSpec(msgspec.Struct, frozen=True):
    """A grammar that an output must match.

    kind: the language of `source`.
        "json_schema": a JSON Schema as JSON. Properties come in the schema's order. Undeclared properties are allowed
        only if `additionalProperties` or `patternProperties` has a schema for them. Whitespace is limited.
        "regex": a regular expression that matches the whole output.
        "ebnf": rules in GBNF. The rule `root` matches the whole output.
        "structural_tag": a structural tag of xgrammar as JSON, with the additions of `grammar.schema_enforcement`.
    place: where the client's request has `source`, for errors: "#", or a path such as `tools[0].function.parameters`.
        `GrammarError.place` appends the JSON pointer of the faulty keyword.
    """

    kind: Literal["json_schema", "regex", "ebnf", "structural_tag"]
    source: str
    place: str = "#"


# For tools whose calls are XML elements. Keys: the places of the tools' schemas, see "place" in
# `grammar.schema_enforcement`. Values: schemas that state only the types of the parameters.
ParameterTypes = dict[str, dict[str, Any]]


class GrammarMatcher(Protocol):
    """The state of one request's output in its grammar."""

    @property
    def end_ids(self) -> frozenset[int]:
        """Token ids that end an output. No token may follow."""
        ...

    def accept(self, token: int) -> bool:
        """Advance by one token. Returns False and does not advance if the grammar forbids the token."""
        ...

    def fill_mask(self, masks: NDArray[np.int32], index: int) -> None:
        """Write the mask of allowed next tokens to masks[index], for `nanovllm_kernels.sampling.apply_masks_`."""
        ...

    @staticmethod
    def accept_all(matchers: "Sequence[GrammarMatcher]", tokens: Sequence[int]) -> list[bool]:
        """Call `accept` of each matcher with its token. After a RuntimeError, some matchers may have advanced."""
        ...

    @staticmethod
    def fill_masks(matchers: "Sequence[GrammarMatcher]", masks: NDArray[np.int32]) -> None:
        """Write the mask of `matchers[i]` to masks[i]."""
        ...

    def fork(self) -> "GrammarMatcher":
        """An independent matcher in the same state."""
        ...


class CompiledGrammar(Protocol):
    """A compiled GrammarSpec."""

    def start(self) -> GrammarMatcher:
        """A matcher in the initial state."""
        ...
