"""What a client says about a grammar, and the interfaces of compiled grammars (implemented in `grammar/`)."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray


class GrammarSpec(msgspec.Struct, frozen=True):
    """A grammar that an output must match, as the client wrote it.

    kind: the language of `source`. "json_schema": a JSON Schema as JSON. Properties come in the schema's order;
        undeclared properties are allowed only where the schema describes them; whitespace is bounded. "regex": a
        regular expression for the whole output. "ebnf": rules in GBNF; the output matches `root`. "structural_tag": a
        structural tag of xgrammar as JSON, with the additions of `nanovllm_core.grammar.schema_enforcement`.
    place: JSON pointer to the root of `source`, with which places in errors begin.
    """

    kind: Literal["json_schema", "regex", "ebnf", "structural_tag"]
    source: str
    place: str = "#"


# By the place of each format "xml_parameters" of a structural tag: a JSON schema that states only the values' types.
ParameterTypes = dict[str, dict[str, Any]]


class GrammarMatcher(Protocol):
    """The state of one request's output in its grammar."""

    @property
    def end_ids(self) -> frozenset[int]:
        """Token ids that end an output; nothing is matched after them."""
        ...

    def accept(self, token: int) -> bool:
        """Advance by one token. Returns False, without any change, if the grammar does not allow the token here."""
        ...

    def fill(self, masks: NDArray[np.int32], index: int) -> None:
        """Write the mask of allowed next tokens to masks[index], see `nanovllm_kernels.sampling.apply_masks_`."""
        ...

    @staticmethod
    def accept_all(matchers: "Sequence[GrammarMatcher]", tokens: Sequence[int]) -> list[bool]:
        """Call `accept` of each matcher. If it raises RuntimeError, some of the matchers have advanced."""
        ...

    @staticmethod
    def fill_all(matchers: "Sequence[GrammarMatcher]", masks: NDArray[np.int32]) -> None:
        """Call `fill` of each matcher, with index 0, 1 and so on."""
        ...


class CompiledGrammar(Protocol):
    """A compiled GrammarSpec, made by `nanovllm_core.grammar`."""

    def start(self) -> GrammarMatcher:
        """A matcher in the initial state."""
        ...
