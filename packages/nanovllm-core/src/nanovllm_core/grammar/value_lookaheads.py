"""Gives property values in a JSON grammar a short lookahead, so that xgrammar compiles large objects fast.

For each rule with one use, xgrammar 0.2.8 derives a lookahead, which covers all texts that may follow. For the value of
a property, the lookahead is a choice of all later optional properties. The time to test tokens against the lookahead
grows with the cube of the number of these properties.
"""

import re
from collections import Counter

_NAME = r"[A-Za-z_][\w.-]*"
_ANY_NAME = re.compile(_NAME)
_LOOKAHEAD_NAME = re.compile(rf"\(=\(({_NAME})\)\)")
# The rule of a property's value (group 1), between whitespace and the rule of the properties that follow.
_VALUE = re.compile(rf'":" {_NAME} ({_NAME}) {_NAME}_part_\d+(?:_\d+)?(?=[ )])')
# A rule of one line without a lookahead: the name (group 1) and the body.
_RULE = re.compile(rf"^({_NAME}) ::= \((?!.*\(=\().*\)$", re.MULTILINE)
# In JSON, whitespace, a comma or the end of the object follows a property's value.
_VALUE_LOOKAHEAD = r" (=([ \n\r\t,}]))"


def shorten_value_lookaheads(grammar: str) -> str:
    """Return an equivalent grammar in which property values have a lookahead of one character.

    grammar: xgrammar's printed EBNF after `merge_whitespace_rules`.
    """
    values = set(_VALUE.findall(grammar))
    if not values:
        return grammar
    num_uses = Counter(_ANY_NAME.findall(grammar))
    # A lookahead does not count as a use. The name of a rule with one use occurs twice: in the definition and the use.
    num_uses.subtract(_LOOKAHEAD_NAME.findall(grammar))
    with_one_use = {name for name in values if num_uses[name] == 2}
    return _RULE.sub(lambda match: match[0] + _VALUE_LOOKAHEAD if match[1] in with_one_use else match[0], grammar)
