"""Converts plans (see `value_plans`) to a JSON schema. xgrammar enforces every keyword of that schema."""

from collections.abc import Iterator
from fractions import Fraction

from nanovllm_core.grammar.schemas.document import SchemaError
from nanovllm_core.grammar.schemas.json_values import JSON
from nanovllm_core.grammar.schemas.library import Library
from nanovllm_core.grammar.schemas.shapes import Conj
from nanovllm_core.grammar.schemas.value_plans import Constants, Items, Numbers, Plan, Properties, Texts, plans

# Maximum number of distinct subschemas of a schema.
MAX_PARTS = 5_000
# Levels of schemas written inside one another; deeper ones go to `$defs`.
MAX_INLINE = 16
# When xgrammar compares two schemas, it ignores properties with these names.
OVERLOOKED = frozenset(
    ("title", "default", "description", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema")
)


def emit(library: Library, root: Conj) -> dict[str, JSON]:
    """Return the JSON schema for xgrammar that permits the values valid against `root`.

    Raises SchemaError if no plan expresses these values, or if no finite value is valid.
    """
    planned = _collect(library, root)
    writer = _Writer(root, planned, _finite(planned))
    if root not in writer.finite:
        raise SchemaError(*library.blame(_dead_end(planned, writer.finite, root)), "allows no finite value")
    return writer.write()


def _collect(library: Library, root: Conj) -> dict[Conj, tuple[Plan, ...] | None]:
    """The plans of `root` and of all schemas inside it."""
    planned: dict[Conj, tuple[Plan, ...] | None] = {}
    waiting = [root]
    while waiting:
        conj = waiting.pop()
        if conj in planned:
            continue
        planned[conj] = plans(library, conj)
        if len(planned) > MAX_PARTS:
            raise SchemaError(
                library.document.root.place, "schema", f"has more than {MAX_PARTS} parts when written out"
            )
        waiting.extend(inner for plan in planned[conj] or () for inner in _inner(plan))
    return planned


def _inner(plan: Plan) -> Iterator[Conj]:
    match plan:
        case Items(prefix, rest):
            yield from prefix
            yield rest
        case Properties(named, others):
            yield from (conj for _, conj, _ in named)
            yield from (conj for _, conj in others)
        case _:
            pass


def _finite(planned: dict[Conj, tuple[Plan, ...] | None]) -> set[Conj]:
    """The schemas that allow a finite value. The others allow no value, or only infinitely nested ones."""
    finite = {conj for conj, value_plans in planned.items() if value_plans is None}
    grown = True
    while grown:
        grown = False
        for conj, value_plans in planned.items():
            if conj not in finite and any(_has_finite_value(plan, finite) for plan in value_plans or ()):
                finite.add(conj)
                grown = True
    return finite


def _has_finite_value(plan: Plan, finite: set[Conj]) -> bool:
    match plan:
        case Constants(values):
            return bool(values)
        case Items(prefix, rest, low):
            head = all(conj in finite for conj in prefix[:low])
            return head and (low <= len(prefix) or rest in finite)
        case Properties(named, others, low):
            count = sum(conj in finite for _, conj, _ in named)
            more = any(conj in finite for _, conj in others)
            return all(conj in finite for _, conj, needed in named if needed) and (low <= count or more)
        case _:
            return True


def _dead_end(planned: dict[Conj, tuple[Plan, ...] | None], finite: set[Conj], conj: Conj) -> Conj:
    """The innermost schema that `conj` requires and that allows no finite value."""
    seen: set[Conj] = set()
    while conj not in seen:
        seen.add(conj)
        needed = [inner for plan in planned[conj] or () for inner in _needed(plan) if inner not in finite]
        conj = needed[0] if needed else conj
    return conj


def _needed(plan: Plan) -> list[Conj]:
    match plan:
        case Items(prefix, rest, low):
            return [*prefix[:low], *([rest] if low > len(prefix) else [])]
        case Properties(named):
            return [conj for _, conj, needed in named if needed]
        case _:
            return []


class _Writer:
    """Writes leaves and schemas that are used once in place; shared, recursive and deeply nested ones under `$defs`."""

    def __init__(self, root: Conj, planned: dict[Conj, tuple[Plan, ...] | None], finite: set[Conj]):
        self.root = root
        self.depth = 0
        self.planned = planned
        self.finite = finite
        self.uses: dict[Conj, int] = {}
        for value_plans in planned.values():
            for plan in value_plans or ():
                for conj in _inner(plan):
                    self.uses[conj] = self.uses.get(conj, 0) + 1
        self.names: dict[Conj, str] = {}
        self.parts: dict[str, JSON] = {}
        self.marks = 0

    def write(self) -> dict[str, JSON]:
        schema = self.schema(self.root)
        # Writing a part may name further parts.
        waiting = list(self.names.items())
        while waiting:
            for conj, name in waiting:
                self.parts[name] = self.schema(conj)
            waiting = [(conj, name) for conj, name in self.names.items() if name not in self.parts]
        if self.parts:
            schema["$defs"] = self.parts
        return schema

    def refer(self, conj: Conj) -> JSON:
        leaf = not any(True for plan in self.planned[conj] or () for _ in _inner(plan))
        if leaf or (self.uses[conj] == 1 and conj != self.root and self.depth < MAX_INLINE):
            self.depth += 1
            schema = self.schema(conj)
            self.depth -= 1
            return schema
        name = self.names.setdefault(conj, _name(len(self.names)))
        return {"$ref": f"#/$defs/{name}"}

    def schema(self, conj: Conj) -> dict[str, JSON]:
        value_plans = self.planned[conj]
        if value_plans is None:
            return {}
        written = [self.one(plan) for plan in value_plans if _has_finite_value(plan, self.finite)]
        return written[0] if len(written) == 1 else {"anyOf": list[JSON](written)}

    def one(self, plan: Plan) -> dict[str, JSON]:
        match plan:
            case Constants(values):
                return self.constants(values)
            case Numbers():
                return _numbers(plan)
            case Texts(None):
                return {"type": "string"}
            case Texts(pattern):
                return {"type": "string", "pattern": pattern}
            case Items():
                return self.items(plan)
            case Properties():
                return self.members(plan)

    def constants(self, values: tuple[JSON, ...]) -> dict[str, JSON]:
        if {value for value in values if isinstance(value, bool)} == {True, False} and len(values) == 2:
            return {"type": "boolean"}
        schema: dict[str, JSON] = {"enum": list(values)}
        return self.marked(schema) if any(isinstance(value, dict | list) for value in values) else schema

    def marked(self, schema: dict[str, JSON]) -> dict[str, JSON]:
        """`schema` with a unique `$anchor`, so that xgrammar does not treat it as equal to another schema."""
        self.marks += 1
        return {**schema, "$anchor": f"n{self.marks}"}

    def items(self, plan: Items) -> dict[str, JSON]:
        prefix = list(plan.prefix)
        high = plan.high
        for index, conj in enumerate(prefix):
            if conj not in self.finite:
                prefix, high = prefix[:index], index
                break
        more = plan.rest in self.finite and (high is None or high > len(prefix))
        schema: dict[str, JSON] = {"type": "array"}
        if prefix:
            schema["prefixItems"] = [self.refer(conj) for conj in prefix]
        schema["items"] = self.refer(plan.rest) if more else False
        if plan.low:
            schema["minItems"] = plan.low
        if more and high is not None:
            schema["maxItems"] = high
        return schema

    def members(self, plan: Properties) -> dict[str, JSON]:
        named = [(name, conj, needed) for name, conj, needed in plan.named if conj in self.finite]
        others = [(pattern, conj) for pattern, conj in plan.others if conj in self.finite]
        schema: dict[str, JSON] = {"type": "object"}
        if named:
            schema["properties"] = {name: self.refer(conj) for name, conj, _ in named}
        if any(needed for *_, needed in named):
            schema["required"] = [name for name, _, needed in named if needed]
        # Equal patterns share one key.
        patterns: dict[str, JSON] = {pattern: self.refer(conj) for pattern, conj in others if pattern is not None}
        free = [conj for pattern, conj in others if pattern is None]
        schema["additionalProperties"] = self.refer(free[0]) if free else False
        if patterns:
            schema["patternProperties"] = patterns
        if plan.low:
            schema["minProperties"] = plan.low
        if plan.high is not None:
            schema["maxProperties"] = plan.high
        return self.marked(schema) if OVERLOOKED.intersection(name for name, *_ in named) else schema


def _numbers(plan: Numbers) -> dict[str, JSON]:
    schema: dict[str, JSON] = {"type": "integer" if plan.integer else "number"}
    if plan.low is not None:
        schema["exclusiveMinimum" if plan.open_low else "minimum"] = _bound(plan.low, plan.integer)
    if plan.high is not None:
        schema["exclusiveMaximum" if plan.open_high else "maximum"] = _bound(plan.high, plan.integer)
    if plan.multiple is not None:
        schema["multipleOf"] = plan.multiple
    return schema


def _bound(value: Fraction, integer: bool) -> JSON:
    return int(value) if integer or value.denominator == 1 else float(value)


def _name(index: int) -> str:
    """A name of letters and underscores only: xgrammar drops other characters from names of rules."""
    return "part_" + "".join(chr(ord("a") + int(digit)) for digit in str(index))
