"""One JSON schema as its author wrote it: limits of its size, places of its parts, and targets of its references."""

from dataclasses import dataclass
from urllib.parse import unquote, urldefrag, urljoin

from nanovllm_core.errors import GrammarError
from nanovllm_core.grammar.schemas.json_values import JSON

# Limits of one schema: approximate size as JSON, depth of nested values, and number of values.
MAX_BYTES = 256 * 1024
MAX_DEPTH = 64
MAX_VALUES = 50_000

# Keywords whose value is a schema; an array of schemas; an object of schemas.
SCHEMA_KEYWORDS = (
    *("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"),
    *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
)
SCHEMA_LIST_KEYWORDS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
SCHEMA_MAP_KEYWORDS = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")


class SchemaError(GrammarError):
    """A schema is invalid or can't be enforced.

    place: JSON pointer to the keyword.
    problem: the end of the message, which begins with the keyword and the place.
    is_invalid: the schema is invalid; otherwise it is valid but can't be enforced.
    """

    def __init__(self, place: str, keyword: str, problem: str, *, is_invalid: bool = False):
        code = "invalid_schema" if is_invalid else "unsupported_schema"
        super().__init__(f"{keyword} at {place} {problem}", place, code)
        self.keyword = keyword
        self.problem = problem


@dataclass(frozen=True, slots=True)
class LocatedSchema:
    """A schema in a document. place: JSON pointer to it. base: URI to which its references are relative."""

    schema: JSON
    place: str
    base: str


class Document:
    """The root schema at `place` and an index of its parts that references can name.

    Raises SchemaError if the schema is too large.
    """

    def __init__(self, schema: JSON, place: str):
        check_schema_size(schema, place)
        self.root = LocatedSchema(schema, place, "")
        self._resources: dict[str, LocatedSchema] = {}
        self._anchors: dict[tuple[str, str], LocatedSchema] = {}
        self._dynamic_anchors: dict[str, list[LocatedSchema]] = {}
        self._bases: dict[int, str] = {}
        self._index_subschemas()

    def _index_subschemas(self) -> None:
        self._resources[""] = self.root
        pending = [self.root]
        while pending:
            located = pending.pop()
            schema = located.schema
            if not isinstance(schema, dict):
                continue
            uri = schema.get("$id")
            if isinstance(uri, str) and uri and not uri.startswith("#"):
                base = urldefrag(urljoin(located.base, uri)).url
                located = LocatedSchema(schema, located.place, base)
                self._resources.setdefault(base, located)
                if located.place == self.root.place:
                    self.root = located
            elif isinstance(uri, str) and uri.startswith("#"):
                self._anchors.setdefault((located.base, uri[1:]), located)
            self._bases[id(schema)] = located.base
            for keyword in ("$anchor", "$dynamicAnchor"):
                anchor = schema.get(keyword)
                if isinstance(anchor, str):
                    self._anchors.setdefault((located.base, anchor), located)
                    if keyword == "$dynamicAnchor":
                        self._dynamic_anchors.setdefault(anchor, []).append(located)
            pending.extend(reversed(subschemas(located)))

    def base(self, located: LocatedSchema) -> str:
        """The URI to which references in the schema at `located` are relative."""
        return self._bases.get(id(located.schema), located.base)

    def resolve_reference(self, located: LocatedSchema, reference: JSON, keyword: str) -> LocatedSchema:
        """The target of `reference`, the value of `keyword` in the schema at `located`. Raises SchemaError."""
        place = f"{located.place}/{keyword}"
        if not isinstance(reference, str):
            raise SchemaError(place, keyword, "must be a string", is_invalid=True)
        address, fragment = urldefrag(urljoin(self.base(located), reference))
        if reference.startswith("#"):
            address, fragment = self.base(located), reference[1:]
        resource = self._resources.get(address)
        if resource is None:
            raise SchemaError(
                place, keyword, f"leads outside of the schema: {reference[:200]!r}; include the schema that it names"
            )
        if fragment and not fragment.startswith("/"):
            anchor = self._anchors.get((address, unquote(fragment)))
            if anchor is None:
                raise SchemaError(place, keyword, f"leads to nothing: {reference[:200]!r}", is_invalid=True)
            return anchor
        return self._resolve_pointer(resource, unquote(fragment), place, keyword)

    def resolve_dynamic_reference(self, located: LocatedSchema, reference: JSON) -> LocatedSchema:
        """The schema that a `$dynamicRef` names. Raises SchemaError if it depends on the context."""
        target = self.resolve_reference(located, reference, "$dynamicRef")
        schema = target.schema
        name = schema.get("$dynamicAnchor") if isinstance(schema, dict) else None
        if isinstance(name, str) and len(self._dynamic_anchors.get(name, ())) > 1:
            problem = "depends on the schemas that lead to it, which can't be enforced; use $ref"
            raise SchemaError(f"{located.place}/$dynamicRef", "$dynamicRef", problem)
        return target

    def _resolve_pointer(self, resource: LocatedSchema, pointer: str, place: str, keyword: str) -> LocatedSchema:
        value, target_place, base = resource.schema, resource.place, resource.base
        for part in pointer.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and name in value:
                value = value[name]
            elif isinstance(value, list) and name.isascii() and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                raise SchemaError(place, keyword, f"leads to nothing: {pointer[:200]!r}", is_invalid=True)
            target_place, base = f"{target_place}/{part}", self._bases.get(id(value), base)
        return LocatedSchema(value, target_place, base)


def subschemas(located: LocatedSchema) -> list[LocatedSchema]:
    """The schemas directly inside the schema at `located`."""
    schema, found = located.schema, list[LocatedSchema]()
    if not isinstance(schema, dict):
        return found
    for keyword, value in schema.items():
        place = f"{located.place}/{escape_pointer_part(keyword)}"
        if keyword in SCHEMA_KEYWORDS and isinstance(value, dict | bool):
            found.append(LocatedSchema(value, place, located.base))
        if keyword in SCHEMA_LIST_KEYWORDS and isinstance(value, list):
            found.extend(LocatedSchema(item, f"{place}/{index}", located.base) for index, item in enumerate(value))
        if keyword in SCHEMA_MAP_KEYWORDS and isinstance(value, dict):
            found.extend(
                LocatedSchema(item, f"{place}/{escape_pointer_part(name)}", located.base)
                for name, item in value.items()
            )
    return found


def escape_pointer_part(name: str) -> str:
    """`name` as a part of a JSON pointer, cut to 100 characters."""
    return name[:100].replace("~", "~0").replace("/", "~1")


def check_schema_size(schema: JSON, place: str) -> None:
    """Refuses a schema that is too large or too deep. A loop, because recursion into a deep schema would overflow."""
    level: list[JSON] = [schema]
    num_values = size_bytes = depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise SchemaError(place, "schema", f"is nested deeper than {MAX_DEPTH} levels", is_invalid=True)
        next_level: list[JSON] = []
        for value in level:
            num_values += 1
            match value:
                case dict():
                    next_level.extend(value.values())
                    size_bytes += sum(len(name) + 4 for name in value)
                case list():
                    next_level.extend(value)
                    size_bytes += len(value)
                case str():
                    size_bytes += len(value) + 2
                case _:
                    size_bytes += 5
        if num_values + len(next_level) > MAX_VALUES or size_bytes > MAX_BYTES:
            limits = f"{MAX_BYTES // 1024} KiB or {MAX_VALUES} values"
            raise SchemaError(place, "schema", f"is larger than {limits}", is_invalid=True)
        level = next_level
