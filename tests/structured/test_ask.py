"""Over HTTP, a real model's answers meet the schemas that they were asked for: a sample of ask.py's run."""

import corpora
import pytest
from ask import ask_all, questions
from asking import WAYS, Client, Named
from tails import tail_of

# One case per kind of problem: endless numbers, recursion, and refused schemas.
SUITE = (
    "type: number type matches numbers",
    "contains: items + contains",
    "ref: root pointer ref",
    "not: not",
)


@pytest.fixture(scope="module")
def client(run_server, default_model):
    flags = ("--max-model-len", "2048", "--cpu-cache-gib", "0.25", "--max-num-seqs", "16")
    with run_server(default_model, *flags) as server:
        yield Client(server.url, 64, 0.0)


def test_answers_of_a_real_model(client):
    suite = [Named("suite", case.name, case.schema) for case in corpora.suite() if case.name in SUITE]
    assert len(suite) == len(SUITE)
    tools = [Named("tools", case.name, case.schema) for case in corpora.tools()[::600]]
    outcomes = ask_all(client, questions([*suite, *tools], ["suite", "tools"], list(WAYS), None), 16)
    verdicts = {outcome.verdict for outcome in outcomes}
    assert {"valid", "refused"} <= verdicts <= {"valid", "refused", "no object", "cut"}, outcomes


@pytest.mark.parametrize(
    ("text", "tokens", "amid", "endless"),
    [
        ('{"a":' + " " * 12, [1], "whitespace", True),
        ('{"a": 1', [1], "number", False),
        ('{"a": 1' + "0" * 50, [1], "number", True),
        ('{"a": "' + "It is so. " * 20, [1, 2, 3] * 50, "string", True),
        ('{"a": "' + "It is so. " * 20, [1, 2, 3] * 20, "string", False),
        ('["x\\"", "A sentence that ends somewhere", "and one that does n', [1] * 200, "string", False),
        ("[" + '"x", ' * 200, [1] * 200, "array or object", False),
    ],
)
def test_the_tail_of_a_cut_answer_is_found(text, tokens, amid, endless):
    tail = tail_of(text, tokens)
    assert (tail.amid, tail.endless) == (amid, endless)
