"""Writes plans as a JSON schema that xgrammar enforces. A plan describes constants, or values of one JSON type."""

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import chain
from typing import TypeAlias

from nanovllm_core.grammar.schemas.document import SchemaError
from nanovllm_core.grammar.schemas.json_values import JSON
from nanovllm_core.grammar.schemas.shape_resolver import ShapeResolver
from nanovllm_core.grammar.schemas.shapes import Conjunction
from nanovllm_core.grammar.schemas.value_plans import (
    ArrayPlan,
    ConstantsPlan,
    NumberPlan,
    ObjectPlan,
    Plan,
    StringPlan,
    plan_values,
)

# Maps each conjunction (schemas that must all hold) to its plans. None: the conjunction allows every value.
PlansByConjunction: TypeAlias = dict[Conjunction, tuple[Plan, ...] | None]
# Maximum number of distinct conjunctions in one schema.
MAX_SUBSCHEMAS = 5_000
# Maximum depth of subschemas that are written in place. Deeper subschemas are written to `$defs`.
# xgrammar's time for a subschema grows with this depth, but each definition adds a rule to the grammar.
MAX_INLINE_DEPTH = 6
# xgrammar ignores properties with these names when it tests whether two schemas are equal.
IGNORED_PROPERTY_NAMES = frozenset(
    ("title", "default", "description", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema")
)


def write_schema(resolver: ShapeResolver, root: Conjunction) -> dict[str, JSON]:
    """Write a JSON schema for xgrammar that permits the values that are valid against `root`.

    Raises SchemaError if no plan can express these values, or if no value of finite depth is valid.
    """
    plans_by_conjunction = _plan_all(resolver, root)
    writer = _SchemaWriter(root, plans_by_conjunction, _find_satisfiable_conjunctions(plans_by_conjunction))
    if root not in writer.satisfiable:
        innermost = _innermost_without_value(plans_by_conjunction, writer.satisfiable, root)
        raise SchemaError(
            *resolver.place_and_keyword(innermost), "allows no value, or only values that are nested without end"
        )
    return writer.write()


def _plan_all(resolver: ShapeResolver, root: Conjunction) -> PlansByConjunction:
    """The plans of `root` and of all schemas inside `root`."""
    plans_by_conjunction: PlansByConjunction = {}
    pending = [root]
    while pending:
        conjunction = pending.pop()
        if conjunction in plans_by_conjunction:
            continue
        plans_by_conjunction[conjunction] = plan_values(resolver, conjunction)
        if len(plans_by_conjunction) > MAX_SUBSCHEMAS:
            problem = f"has more than {MAX_SUBSCHEMAS} parts when written out"
            raise SchemaError(resolver.document.root.place, "schema", problem)
        pending.extend(_inner_conjunctions(plans_by_conjunction[conjunction]))
    return plans_by_conjunction


def _inner_conjunctions(value_plans: tuple[Plan, ...] | None) -> Iterator[Conjunction]:
    """The conjunctions of the items and properties of the planned values."""
    for plan in value_plans or ():
        match plan:
            case ArrayPlan(prefix, rest):
                yield from prefix
                yield rest
            case ObjectPlan(named, name_patterns):
                yield from (conjunction for _, conjunction, _ in named)
                yield from (conjunction for _, conjunction in name_patterns)
            case _:
                pass


def _find_satisfiable_conjunctions(plans_by_conjunction: PlansByConjunction) -> set[Conjunction]:
    """The conjunctions that allow a value of finite depth."""
    satisfiable = {conjunction for conjunction, value_plans in plans_by_conjunction.items() if value_plans is None}
    has_grown = True
    while has_grown:
        has_grown = False
        # Most inner conjunctions were planned after the outer ones. In reverse order, few passes suffice.
        for conjunction, value_plans in reversed(plans_by_conjunction.items()):
            if conjunction not in satisfiable and any(_has_value(plan, satisfiable) for plan in value_plans or ()):
                satisfiable.add(conjunction)
                has_grown = True
    return satisfiable


def _has_value(plan: Plan, satisfiable: set[Conjunction]) -> bool:
    if not satisfiable.issuperset(_required_conjunctions(plan)):
        return False
    match plan:
        case ConstantsPlan(values):
            return bool(values)
        case ObjectPlan(named, name_patterns, low):
            num_satisfiable = sum(conjunction in satisfiable for _, conjunction, _ in named)
            return low <= num_satisfiable or any(conjunction in satisfiable for _, conjunction in name_patterns)
        case _:
            return True


def _innermost_without_value(
    plans_by_conjunction: PlansByConjunction, satisfiable: set[Conjunction], conjunction: Conjunction
) -> Conjunction:
    """Follow required items and properties from `conjunction` to the innermost conjunction without a value."""
    seen: set[Conjunction] = set()
    while conjunction not in seen:
        seen.add(conjunction)
        required = (inner for plan in plans_by_conjunction[conjunction] or () for inner in _required_conjunctions(plan))
        conjunction = next((inner for inner in required if inner not in satisfiable), conjunction)
    return conjunction


def _required_conjunctions(plan: Plan) -> list[Conjunction]:
    """The conjunctions of the items and properties that each planned value has."""
    match plan:
        case ArrayPlan(prefix, rest, low):
            return [*prefix[:low], *([rest] if low > len(prefix) else [])]
        case ObjectPlan(named):
            return [conjunction for _, conjunction, is_required in named if is_required]
        case _:
            return []


class _SchemaWriter:
    """Writes one schema. Shared, recursive and deep subschemas go to `$defs`."""

    def __init__(self, root: Conjunction, plans_by_conjunction: PlansByConjunction, satisfiable: set[Conjunction]):
        self.root = root
        self.depth = 0  # Number of nested subschemas that are being written in place.
        self.plans_by_conjunction = plans_by_conjunction
        self.satisfiable = satisfiable
        self.num_uses = Counter(chain.from_iterable(map(_inner_conjunctions, plans_by_conjunction.values())))
        self.definition_names: dict[Conjunction, str] = {}
        self.definitions: dict[str, JSON] = {}
        self.num_unique_anchors = 0

    def write(self) -> dict[str, JSON]:
        schema = self.write_body(self.root)
        # Writing a definition may add names of definitions that are not written yet.
        while len(self.definitions) < len(self.definition_names):
            for conjunction, name in list(self.definition_names.items())[len(self.definitions) :]:
                self.definitions[name] = self.write_body(conjunction)
        if self.definitions:
            schema["$defs"] = self.definitions
        return schema

    def write_subschema(self, conjunction: Conjunction) -> JSON:
        is_leaf = not any(True for _ in _inner_conjunctions(self.plans_by_conjunction[conjunction]))
        if is_leaf or (self.num_uses[conjunction] == 1 and conjunction != self.root and self.depth < MAX_INLINE_DEPTH):
            self.depth += 1
            schema = self.write_body(conjunction)
            self.depth -= 1
            return schema
        name = self.definition_names.setdefault(conjunction, _definition_name(len(self.definition_names)))
        return {"$ref": f"#/$defs/{name}"}

    def write_body(self, conjunction: Conjunction) -> dict[str, JSON]:
        value_plans = self.plans_by_conjunction[conjunction]
        if value_plans is None:
            return {}
        written = [self.write_plan(plan) for plan in value_plans if _has_value(plan, self.satisfiable)]
        return written[0] if len(written) == 1 else {"anyOf": list[JSON](written)}

    def write_plan(self, plan: Plan) -> dict[str, JSON]:
        match plan:
            case ConstantsPlan(values):
                return self.write_constants(values)
            case NumberPlan():
                return _write_numbers(plan)
            case StringPlan(None):
                return {"type": "string"}
            case StringPlan(pattern):
                return {"type": "string", "pattern": pattern}
            case ArrayPlan():
                return self.write_array(plan)
            case ObjectPlan():
                return self.write_object(plan)

    def write_constants(self, values: tuple[JSON, ...]) -> dict[str, JSON]:
        if {value for value in values if isinstance(value, bool)} == {True, False} and len(values) == 2:
            return {"type": "boolean"}
        schema: dict[str, JSON] = {"enum": list(values)}
        return self.with_unique_anchor(schema) if any(isinstance(value, dict | list) for value in values) else schema

    def with_unique_anchor(self, schema: dict[str, JSON]) -> dict[str, JSON]:
        """Add a unique `$anchor`, so that xgrammar does not treat two schemas as equal."""
        self.num_unique_anchors += 1
        return {**schema, "$anchor": f"n{self.num_unique_anchors}"}

    def write_array(self, plan: ArrayPlan) -> dict[str, JSON]:
        prefix = list(plan.prefix)
        high = plan.high
        for index, conjunction in enumerate(prefix):
            if conjunction not in self.satisfiable:
                prefix, high = prefix[:index], index
                break
        has_more_items = plan.rest in self.satisfiable and (high is None or high > len(prefix))
        schema: dict[str, JSON] = {"type": "array"}
        if prefix:
            schema["prefixItems"] = [self.write_subschema(conjunction) for conjunction in prefix]
        schema["items"] = self.write_subschema(plan.rest) if has_more_items else False
        if plan.low:
            schema["minItems"] = plan.low
        if has_more_items and high is not None:
            schema["maxItems"] = high
        return schema

    def write_object(self, plan: ObjectPlan) -> dict[str, JSON]:
        named = [prop for prop in plan.named if prop[1] in self.satisfiable]
        name_patterns = [prop for prop in plan.name_patterns if prop[1] in self.satisfiable]
        schema: dict[str, JSON] = {"type": "object"}
        if named:
            schema["properties"] = {name: self.write_subschema(conjunction) for name, conjunction, _ in named}
        if any(is_required for *_, is_required in named):
            schema["required"] = [name for name, _, is_required in named if is_required]
        patterns: dict[str, JSON] = {
            pattern: self.write_subschema(conjunction) for pattern, conjunction in name_patterns if pattern is not None
        }
        any_name_conjunctions = [conjunction for pattern, conjunction in name_patterns if pattern is None]
        schema["additionalProperties"] = (
            self.write_subschema(any_name_conjunctions[0]) if any_name_conjunctions else False
        )
        if patterns:
            schema["patternProperties"] = patterns
        if plan.low:
            schema["minProperties"] = plan.low
        if plan.high is not None:
            schema["maxProperties"] = plan.high
        has_ignored_name = any(name in IGNORED_PROPERTY_NAMES for name, *_ in named)
        return self.with_unique_anchor(schema) if has_ignored_name else schema


def _write_numbers(plan: NumberPlan) -> dict[str, JSON]:
    schema: dict[str, JSON] = {"type": "integer" if plan.integer else "number"}
    if plan.low is not None:
        schema["exclusiveMinimum" if plan.excludes_low else "minimum"] = _write_bound(plan.low, plan.integer)
    if plan.high is not None:
        schema["exclusiveMaximum" if plan.excludes_high else "maximum"] = _write_bound(plan.high, plan.integer)
    if plan.divisor is not None:
        schema["multipleOf"] = plan.divisor
    return schema


def _write_bound(value: Fraction, is_integer: bool) -> JSON:
    return int(value) if is_integer or value.denominator == 1 else float(value)


def _definition_name(index: int) -> str:
    """Write the digits of `index` as letters, because xgrammar drops digits from names of rules."""
    return "part_" + "".join(chr(ord("a") + int(digit)) for digit in str(index))
