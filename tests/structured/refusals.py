"""What refusals of schemas name: keywords that some schema has with what can't be enforced, or that nothing meets."""

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
    """Whether what a refusal says begins with the keyword that it is for."""
    return message.split(" ", 1)[0] in KEYWORDS
