"""Converts plans (see `value_plans`) to a JSON schema. xgrammar enforces every keyword of that schema."""

from collections.abc import Iterator
from fractions import Fraction
from typing import TypeAlias

from nanovllm_core.grammar.schemas.document import SchemaError
from nanovllm_core.grammar.schemas.json_values import JSON
from nanovllm_core.grammar.schemas.shape_resolver import ShapeResolver
from nanovllm_core.grammar.schemas.shapes import SchemaSet
from nanovllm_core.grammar.schemas.value_plans import Constants, Items, Numbers, Plan, Properties, Texts, plan_values

# The plans of each set of schemas; None if any value is valid.
PlansBySet: TypeAlias = dict[SchemaSet, tuple[Plan, ...] | None]
# Maximum number of distinct subschemas of a schema.
MAX_SUBSCHEMAS = 5_000
# Maximum depth of schemas that are written in place. Deeper schemas go to `$defs`.
MAX_INLINE_DEPTH = 16
# When xgrammar tests whether two schemas are equal, it ignores properties with these names.
IGNORED_PROPERTY_NAMES = frozenset(
    ("title", "default", "description", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema")
)


def write_schema(resolver: ShapeResolver, root: SchemaSet) -> dict[str, JSON]:
    """Return the JSON schema for xgrammar that permits the values valid against `root`.

    Raises SchemaError if no plan expresses these values, or if no finite value is valid.
    """
    plans_by_set = _plan_all(resolver, root)
    writer = _SchemaWriter(root, plans_by_set, _find_finite(plans_by_set))
    if root not in writer.finite:
        innermost = _innermost_without_value(plans_by_set, writer.finite, root)
        raise SchemaError(*resolver.place_and_keyword(innermost), "allows no finite value")
    return writer.write()


def _plan_all(resolver: ShapeResolver, root: SchemaSet) -> PlansBySet:
    """The plans of `root` and of all schemas inside it."""
    plans_by_set: PlansBySet = {}
    pending = [root]
    while pending:
        schema_set = pending.pop()
        if schema_set in plans_by_set:
            continue
        plans_by_set[schema_set] = plan_values(resolver, schema_set)
        if len(plans_by_set) > MAX_SUBSCHEMAS:
            problem = f"has more than {MAX_SUBSCHEMAS} parts when written out"
            raise SchemaError(resolver.document.root.place, "schema", problem)
        pending.extend(inner for plan in plans_by_set[schema_set] or () for inner in _inner_sets(plan))
    return plans_by_set


def _inner_sets(plan: Plan) -> Iterator[SchemaSet]:
    match plan:
        case Items(prefix, rest):
            yield from prefix
            yield rest
        case Properties(named, undeclared):
            yield from (schema_set for _, schema_set, _ in named)
            yield from (schema_set for _, schema_set in undeclared)
        case _:
            pass


def _find_finite(plans_by_set: PlansBySet) -> set[SchemaSet]:
    """The schemas that allow a finite value. The others allow no value, or only values nested without end."""
    finite = {schema_set for schema_set, value_plans in plans_by_set.items() if value_plans is None}
    has_grown = True
    while has_grown:
        has_grown = False
        for schema_set, value_plans in plans_by_set.items():
            if schema_set not in finite and any(_has_finite_value(plan, finite) for plan in value_plans or ()):
                finite.add(schema_set)
                has_grown = True
    return finite


def _has_finite_value(plan: Plan, finite: set[SchemaSet]) -> bool:
    match plan:
        case Constants(values):
            return bool(values)
        case Items(prefix, rest, low):
            is_prefix_finite = all(schema_set in finite for schema_set in prefix[:low])
            return is_prefix_finite and (low <= len(prefix) or rest in finite)
        case Properties(named, undeclared, low):
            if any(schema_set not in finite for _, schema_set, is_required in named if is_required):
                return False
            num_finite = sum(schema_set in finite for _, schema_set, _ in named)
            return low <= num_finite or any(schema_set in finite for _, schema_set in undeclared)
        case _:
            return True


def _innermost_without_value(plans_by_set: PlansBySet, finite: set[SchemaSet], schema_set: SchemaSet) -> SchemaSet:
    """The innermost schema that `schema_set` requires and that allows no finite value."""
    seen: set[SchemaSet] = set()
    while schema_set not in seen:
        seen.add(schema_set)
        required_sets = (inner for plan in plans_by_set[schema_set] or () for inner in _required_sets(plan))
        schema_set = next((inner for inner in required_sets if inner not in finite), schema_set)
    return schema_set


def _required_sets(plan: Plan) -> list[SchemaSet]:
    match plan:
        case Items(prefix, rest, low):
            return [*prefix[:low], *([rest] if low > len(prefix) else [])]
        case Properties(named):
            return [schema_set for _, schema_set, is_required in named if is_required]
        case _:
            return []


class _SchemaWriter:
    """Writes one schema: leaves and subschemas with one use in place; shared, recursive and deep ones under `$defs`."""

    def __init__(self, root: SchemaSet, plans_by_set: PlansBySet, finite: set[SchemaSet]):
        self.root = root
        self.depth = 0
        self.plans_by_set = plans_by_set
        self.finite = finite
        self.num_uses: dict[SchemaSet, int] = {}
        for value_plans in plans_by_set.values():
            for plan in value_plans or ():
                for schema_set in _inner_sets(plan):
                    self.num_uses[schema_set] = self.num_uses.get(schema_set, 0) + 1
        self.definition_names: dict[SchemaSet, str] = {}
        self.definitions: dict[str, JSON] = {}
        self.num_anchors = 0

    def write(self) -> dict[str, JSON]:
        schema = self.write_body(self.root)
        # Writing a definition may add names of further definitions.
        while len(self.definitions) < len(self.definition_names):
            for schema_set, name in list(self.definition_names.items())[len(self.definitions) :]:
                self.definitions[name] = self.write_body(schema_set)
        if self.definitions:
            schema["$defs"] = self.definitions
        return schema

    def write_subschema(self, schema_set: SchemaSet) -> JSON:
        is_leaf = not any(True for plan in self.plans_by_set[schema_set] or () for _ in _inner_sets(plan))
        if is_leaf or (self.num_uses[schema_set] == 1 and schema_set != self.root and self.depth < MAX_INLINE_DEPTH):
            self.depth += 1
            schema = self.write_body(schema_set)
            self.depth -= 1
            return schema
        name = self.definition_names.setdefault(schema_set, _definition_name(len(self.definition_names)))
        return {"$ref": f"#/$defs/{name}"}

    def write_body(self, schema_set: SchemaSet) -> dict[str, JSON]:
        value_plans = self.plans_by_set[schema_set]
        if value_plans is None:
            return {}
        written = [self.write_plan(plan) for plan in value_plans if _has_finite_value(plan, self.finite)]
        return written[0] if len(written) == 1 else {"anyOf": list[JSON](written)}

    def write_plan(self, plan: Plan) -> dict[str, JSON]:
        match plan:
            case Constants(values):
                return self.write_constants(values)
            case Numbers():
                return _write_numbers(plan)
            case Texts(None):
                return {"type": "string"}
            case Texts(pattern):
                return {"type": "string", "pattern": pattern}
            case Items():
                return self.write_array(plan)
            case Properties():
                return self.write_object(plan)

    def write_constants(self, values: tuple[JSON, ...]) -> dict[str, JSON]:
        if {value for value in values if isinstance(value, bool)} == {True, False} and len(values) == 2:
            return {"type": "boolean"}
        schema: dict[str, JSON] = {"enum": list(values)}
        return self.with_unique_anchor(schema) if any(isinstance(value, dict | list) for value in values) else schema

    def with_unique_anchor(self, schema: dict[str, JSON]) -> dict[str, JSON]:
        """`schema` with a unique `$anchor`, so that xgrammar does not treat it as equal to another schema."""
        self.num_anchors += 1
        return {**schema, "$anchor": f"n{self.num_anchors}"}

    def write_array(self, plan: Items) -> dict[str, JSON]:
        prefix = list(plan.prefix)
        high = plan.high
        for index, schema_set in enumerate(prefix):
            if schema_set not in self.finite:
                prefix, high = prefix[:index], index
                break
        has_more_items = plan.rest in self.finite and (high is None or high > len(prefix))
        schema: dict[str, JSON] = {"type": "array"}
        if prefix:
            schema["prefixItems"] = [self.write_subschema(schema_set) for schema_set in prefix]
        schema["items"] = self.write_subschema(plan.rest) if has_more_items else False
        if plan.low:
            schema["minItems"] = plan.low
        if has_more_items and high is not None:
            schema["maxItems"] = high
        return schema

    def write_object(self, plan: Properties) -> dict[str, JSON]:
        named = [prop for prop in plan.named if prop[1] in self.finite]
        undeclared = [(pattern, schema_set) for pattern, schema_set in plan.undeclared if schema_set in self.finite]
        schema: dict[str, JSON] = {"type": "object"}
        if named:
            schema["properties"] = {name: self.write_subschema(schema_set) for name, schema_set, _ in named}
        if any(is_required for *_, is_required in named):
            schema["required"] = [name for name, _, is_required in named if is_required]
        # Equal patterns share one key.
        patterns: dict[str, JSON] = {
            pattern: self.write_subschema(schema_set) for pattern, schema_set in undeclared if pattern is not None
        }
        any_name_sets = [schema_set for pattern, schema_set in undeclared if pattern is None]
        schema["additionalProperties"] = self.write_subschema(any_name_sets[0]) if any_name_sets else False
        if patterns:
            schema["patternProperties"] = patterns
        if plan.low:
            schema["minProperties"] = plan.low
        if plan.high is not None:
            schema["maxProperties"] = plan.high
        has_ignored_name = any(name in IGNORED_PROPERTY_NAMES for name, *_ in named)
        return self.with_unique_anchor(schema) if has_ignored_name else schema


def _write_numbers(plan: Numbers) -> dict[str, JSON]:
    schema: dict[str, JSON] = {"type": "integer" if plan.integer else "number"}
    if plan.low is not None:
        schema["exclusiveMinimum" if plan.excludes_low else "minimum"] = _write_bound(plan.low, plan.integer)
    if plan.high is not None:
        schema["exclusiveMaximum" if plan.excludes_high else "maximum"] = _write_bound(plan.high, plan.integer)
    if plan.divisor is not None:
        schema["multipleOf"] = plan.divisor
    return schema


def _write_bound(value: Fraction, integer: bool) -> JSON:
    return int(value) if integer or value.denominator == 1 else float(value)


def _definition_name(index: int) -> str:
    """A name of letters and underscores only: xgrammar drops other characters from names of rules."""
    return "part_" + "".join(chr(ord("a") + int(digit)) for digit in str(index))
