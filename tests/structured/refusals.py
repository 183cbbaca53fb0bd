"""The keywords that can begin an error message about a refused schema."""

KEYWORDS = frozenset(
    {
        *("$dynamicRef", "$recursiveRef", "$ref", "allOf", "anyOf", "const", "contains", "dependentRequired", "enum"),
        *("exclusiveMaximum", "exclusiveMinimum", "if", "items", "maxItems", "maxLength", "maxProperties", "maximum"),
        *("minItems", "minLength", "minProperties", "minimum", "multipleOf", "not", "oneOf", "pattern", "schema"),
        *("patternProperties", "propertyNames", "required", "type", "unevaluatedItems", "unevaluatedProperties"),
        *("dependencies", "uniqueItems"),
    }
)


def names_keyword(message: str) -> bool:
    return message.split(" ", 1)[0] in KEYWORDS
