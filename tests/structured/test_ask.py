"""Runs ask.py and compare_drafts.py with a few schemas."""

from dataclasses import replace

import corpora
import pytest
from ask import ask_all, make_questions
from asking import WAYS, Client, NamedSchema
from compare_drafts import find_differences
from tails import find_tail

SUITE_CASES = (
    "type: number type matches numbers",
    "contains: items + contains",
    "ref: root pointer ref",
    "not: not",
)
# Measured times decide how a prompt is split into chunks. In bf16, another split may change tokens.
FLAGS = ("--dtype", "float32", "--max-model-len", "2048", "--cpu-cache-gib", "0.25", "--max-num-seqs", "16")


@pytest.fixture(scope="module")
def client(run_server, default_model):
    with run_server(default_model, *FLAGS) as server:
        yield Client(server.url, 64, 0.0)


@pytest.fixture(scope="module")
def outcomes(client):
    suite = [NamedSchema("suite", case.name, case.schema) for case in corpora.load_suite() if case.name in SUITE_CASES]
    assert len(suite) == len(SUITE_CASES)
    tools = [NamedSchema("tools", case.name, case.schema) for case in corpora.load_tool_parameters()[:1]]
    return ask_all(client, make_questions([*suite, *tools], ["suite", "tools"], list(WAYS), None), 16)


def test_a_real_models_answers_are_valid_cut_off_or_refused(outcomes):
    verdicts = {outcome.verdict for outcome in outcomes}
    assert {"valid", "refused"} <= verdicts <= {"valid", "refused", "no object", "cut"}, outcomes


@pytest.mark.slow
def test_answers_with_drafts_are_equal(run_server, default_model, client, outcomes):
    plain = [outcome for outcome in outcomes if outcome.question.corpus == "tools"]
    with run_server(default_model, *FLAGS, "--speculate", "ngram") as server:
        drafted = ask_all(Client(server.url, 64, 0.0), [outcome.question for outcome in plain], 16)
    assert sum(outcome.accepted_drafts for outcome in drafted) > 0
    assert sum(outcome.accepted_drafts + outcome.rejected_drafts for outcome in plain) == 0
    assert find_differences(client, plain, drafted) == []


def test_difference_has_its_place_and_margin(client, outcomes):
    valid = [index for index, each in enumerate(outcomes) if each.verdict == "valid"]
    index = min(valid, key=lambda valid_index: outcomes[valid_index].tokens)
    outcome = outcomes[index]
    likeliest = client.likeliest_tokens(outcome.question, index)
    # The grammar may force an unlikely token: find a place with a likely token.
    place = next(place for place, token in enumerate(outcome.token_ids) if token in likeliest[place])
    chosen, top = outcome.token_ids[place], likeliest[place]
    other = next(token for token in top if token != chosen)
    changed = replace(outcome, token_ids=(*outcome.token_ids[:place], other))
    (difference,) = find_differences(client, outcomes, [*outcomes[:index], changed, *outcomes[index + 1 :]])
    assert (difference.seed, difference.position, difference.tokens) == (index, place, (chosen, other))
    assert difference.margin == pytest.approx(top[chosen] - top[other], abs=1e-3)


@pytest.mark.parametrize(
    ("text", "tokens", "part", "endless"),
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
def test_the_tail_of_a_cut_answer_is_found(text, tokens, part, endless):
    tail = find_tail(text, tokens)
    assert (tail.part, tail.endless) == (part, endless)
