"""Checks the size of a JSON schema, finds its subschemas and resolves its references."""

from dataclasses import dataclass
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from nanovllm_core.errors import GrammarError
from nanovllm_core.grammar.schemas.json_values import JSON

# Limits on a schema. MAX_BYTES limits the approximate size as JSON.
MAX_BYTES = 256 * 1024
MAX_DEPTH = 64
MAX_VALUES = 50_000

# Keywords by the kind of their value: one schema, a list of schemas, or a map from names to schemas.
SCHEMA_KEYWORDS = (
    *("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"),
    *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
)
SCHEMA_LIST_KEYWORDS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
SCHEMA_MAP_KEYWORDS = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")


class SchemaError(GrammarError):
    """A schema is invalid or can't be enforced.

    place: JSON pointer to the keyword.
    problem: the end of the message, after the keyword and the place.
    is_invalid: False: the schema is valid, but can't be enforced.
    """

    def __init__(self, place: str, keyword: str, problem: str, *, is_invalid: bool = False):
        code = "invalid_schema" if is_invalid else "unsupported_schema"
        super().__init__(f"{keyword} at {place} {problem}", place, code)
        self.keyword = keyword
        self.problem = problem


@dataclass(frozen=True, slots=True)
class LocatedSchema:
    """A schema in a document. place: JSON pointer to the schema. base_uri: URI to which references are relative."""

    schema: JSON
    place: str
    base_uri: str


class Document:
    """Finds the subschemas of a schema by URI and by anchor. Raises SchemaError if the schema is too large."""

    def __init__(self, schema: JSON, place: str):
        check_schema_size(schema, place)
        self.root = LocatedSchema(schema, place, "")
        self._schema_by_uri: dict[str, LocatedSchema] = {}
        self._schema_by_anchor: dict[tuple[str, str], LocatedSchema] = {}
        self._schemas_by_dynamic_anchor: dict[str, list[LocatedSchema]] = {}
        self._base_uri_by_object_id: dict[int, str] = {}
        self._index_subschemas()

    def _index_subschemas(self) -> None:
        self._schema_by_uri[""] = self.root
        pending = [self.root]
        while pending:
            located = pending.pop()
            schema = located.schema
            if not isinstance(schema, dict):
                continue
            uri = schema.get("$id")
            if isinstance(uri, str) and uri and not uri.startswith("#"):
                base_uri, _ = _join_uris(located.base_uri, uri, f"{located.place}/$id", "$id")
                located = LocatedSchema(schema, located.place, base_uri)
                self._schema_by_uri.setdefault(base_uri, located)
                if located.place == self.root.place:
                    self.root = located
            elif isinstance(uri, str) and uri.startswith("#"):
                self._schema_by_anchor.setdefault((located.base_uri, uri[1:]), located)
            self._base_uri_by_object_id[id(schema)] = located.base_uri
            for keyword in ("$anchor", "$dynamicAnchor"):
                anchor = schema.get(keyword)
                if isinstance(anchor, str):
                    self._schema_by_anchor.setdefault((located.base_uri, anchor), located)
                    if keyword == "$dynamicAnchor":
                        self._schemas_by_dynamic_anchor.setdefault(anchor, []).append(located)
            pending.extend(reversed(subschemas(located)))

    def base_uri(self, located: LocatedSchema) -> str:
        """The URI to which references in this schema are relative: `located.base_uri`, or the schema's "$id"."""
        return self._base_uri_by_object_id.get(id(located.schema), located.base_uri)

    def resolve_reference(self, located: LocatedSchema, reference: JSON, keyword: str) -> LocatedSchema:
        """Find the schema that `reference` names. `located` contains the reference. Raises SchemaError."""
        place = f"{located.place}/{keyword}"
        if not isinstance(reference, str):
            raise SchemaError(place, keyword, "must be a string", is_invalid=True)
        address, fragment = _join_uris(self.base_uri(located), reference, place, keyword)
        if reference.startswith("#"):
            address, fragment = self.base_uri(located), reference[1:]
        resource = self._schema_by_uri.get(address)
        if resource is None:
            raise SchemaError(
                place, keyword, f"points outside the schema: {reference[:200]!r}; include the referenced schema"
            )
        if fragment and not fragment.startswith("/"):
            anchor = self._schema_by_anchor.get((address, unquote(fragment)))
            if anchor is None:
                raise SchemaError(place, keyword, f"leads to nothing: {reference[:200]!r}", is_invalid=True)
            return anchor
        return self._resolve_pointer(resource, unquote(fragment), place, keyword)

    def resolve_dynamic_reference(self, located: LocatedSchema, reference: JSON) -> LocatedSchema:
        """Find the schema that a `$dynamicRef` names. Raises SchemaError if several schemas have this anchor."""
        target = self.resolve_reference(located, reference, "$dynamicRef")
        schema = target.schema
        name = schema.get("$dynamicAnchor") if isinstance(schema, dict) else None
        if isinstance(name, str) and len(self._schemas_by_dynamic_anchor.get(name, ())) > 1:
            problem = "depends on the chain of references; use $ref instead"
            raise SchemaError(f"{located.place}/$dynamicRef", "$dynamicRef", problem)
        return target

    def _resolve_pointer(self, resource: LocatedSchema, pointer: str, place: str, keyword: str) -> LocatedSchema:
        value, target_place, base_uri = resource.schema, resource.place, resource.base_uri
        for part in pointer.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and name in value:
                value = value[name]
            elif isinstance(value, list) and name.isascii() and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                raise SchemaError(place, keyword, f"leads to nothing: {pointer[:200]!r}", is_invalid=True)
            target_place, base_uri = f"{target_place}/{part}", self._base_uri_by_object_id.get(id(value), base_uri)
        return LocatedSchema(value, target_place, base_uri)


def _join_uris(base_uri: str, reference: str, place: str, keyword: str) -> tuple[str, str]:
    """Returns (URI without its fragment, fragment) of `reference`, the value of `keyword`. Raises SchemaError."""
    try:
        urlsplit(reference)  # `urljoin` does not check the reference if `base_uri` is empty.
        return urldefrag(urljoin(base_uri, reference))
    except ValueError as error:
        raise SchemaError(place, keyword, f"must be a valid URI reference: {error}", is_invalid=True) from error


def subschemas(located: LocatedSchema) -> list[LocatedSchema]:
    """The schemas directly inside the schema at `located`."""
    schema, found = located.schema, list[LocatedSchema]()
    if not isinstance(schema, dict):
        return found
    for keyword, value in schema.items():
        place = f"{located.place}/{escape_pointer_part(keyword)}"
        if keyword in SCHEMA_KEYWORDS and isinstance(value, dict | bool):
            found.append(LocatedSchema(value, place, located.base_uri))
        if keyword in SCHEMA_LIST_KEYWORDS and isinstance(value, list):
            found.extend(LocatedSchema(item, f"{place}/{index}", located.base_uri) for index, item in enumerate(value))
        if keyword in SCHEMA_MAP_KEYWORDS and isinstance(value, dict):
            found.extend(
                LocatedSchema(item, f"{place}/{escape_pointer_part(name)}", located.base_uri)
                for name, item in value.items()
            )
    return found


def escape_pointer_part(name: str) -> str:
    """Cut `name` to 100 characters, and escape it for a JSON pointer."""
    return name[:100].replace("~", "~0").replace("/", "~1")


def check_schema_size(schema: JSON, place: str) -> None:
    """Raises SchemaError if the schema is too large or too deep."""
    # Use a loop, because recursion into a deep schema would overflow the stack.
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
