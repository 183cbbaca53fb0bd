"""`python tests/structured/compare_drafts.py`: asks for JSON and tool calls with and without drafts, and compares.

It starts two servers, one after the other, with the default model in float32 on the CPU. Only the first server has
`--speculate`. `--speculate draft` makes the default model its own draft model. `--speculate mtp` needs `--model`, a
checkpoint with heads for multi-token prediction and a tokenizer. The program exits with 1 if an answer is a failure or
differs.
"""

import argparse
import json
import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from ask import CORPORA, ask_all, format_table, make_questions, read_cases, record, run_own_server
from asking import FAILURES, WAYS, Client, Outcome, Question

from nanovllm_models.default_model import MODEL_NAME

PLAIN_FLAGS = ("--device", "cpu", "--dtype", "float32")
ALWAYS_DRAFT_DIRECTORY = Path(__file__).parent / "always_draft"
DRAFT_FLAGS = {
    "ngram": (*PLAIN_FLAGS, "--speculate", "ngram"),
    "draft": (*PLAIN_FLAGS, "--speculate", "draft", "--draft-model", MODEL_NAME),
    "mtp": (*PLAIN_FLAGS, "--speculate", "mtp"),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token in which two answers differ. Pairs are in the order (without drafts, with drafts).

    tokens: None for an answer that has ended.
    margin: log-probability of the token without drafts minus the log-probability of the token with drafts.
    """

    name: str
    way: str
    seed: int
    verdicts: tuple[str, str]
    position: int
    tokens: tuple[int | None, int | None]
    margin: float | None


def spread(questions: list[Question], number: int) -> list[Question]:
    count = min(number, len(questions))
    return [questions[index * len(questions) // count] for index in range(count)]


def find_differences(client: Client, plain: list[Outcome], drafted: list[Outcome]) -> list[Difference]:
    """client: client of the server without drafts."""
    return [
        _difference(client, seed, *pair)
        for seed, pair in enumerate(zip(plain, drafted, strict=True))
        if pair[0].token_ids != pair[1].token_ids or pair[0].verdict != pair[1].verdict
    ]


def _difference(client: Client, seed: int, plain: Outcome, drafted: Outcome) -> Difference:
    both = zip(plain.token_ids, drafted.token_ids, strict=False)
    position = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
    token_without_drafts, token_with_drafts = (
        outcome.token_ids[position] if position < len(outcome.token_ids) else None for outcome in (plain, drafted)
    )
    return Difference(
        ", ".join(each.name for each in plain.question.schemas),
        plain.question.way,
        seed,
        (plain.verdict, drafted.verdict),
        position,
        (token_without_drafts, token_with_drafts),
        _margin(client, seed, plain, position, token_with_drafts),
    )


def _margin(client: Client, seed: int, plain: Outcome, position: int, token_with_drafts: int | None) -> float | None:
    if position >= len(plain.token_ids) or token_with_drafts is None:
        return None
    # The repeated answer may differ, because the question is now alone in its steps.
    repeated = client.ask(plain.question, seed)
    if repeated.token_ids[: position + 1] != plain.token_ids[: position + 1]:
        return None
    top = client.likeliest_tokens(plain.question, seed)[position]
    token_without_drafts = plain.token_ids[position]
    return (
        top[token_without_drafts] - top[token_with_drafts]
        if {token_without_drafts, token_with_drafts} <= top.keys()
        else None
    )


def format_summary(outcomes: list[Outcome]) -> str:
    answered = [outcome for outcome in outcomes if outcome.token_ids]
    failures = sum(outcome.verdict in FAILURES for outcome in outcomes)
    tokens = sum(outcome.tokens for outcome in outcomes)
    accepted = sum(outcome.accepted_drafts for outcome in outcomes)
    verified = accepted + sum(outcome.rejected_drafts for outcome in outcomes)
    return f"{len(answered)} answers, {failures} failures, {tokens} tokens, {accepted} of {verified} drafts accepted"


@dataclass(frozen=True, slots=True)
class Comparison:
    temperature: float
    plain: list[Outcome]
    drafted: list[Outcome]
    differences: list[Difference]

    @property
    def is_good(self) -> bool:
        return not self.differences and not any(outcome.verdict in FAILURES for outcome in (*self.plain, *self.drafted))

    def describe(self) -> str:
        lines = [f"\ntemperature {self.temperature:g}, with drafts", format_table(self.drafted)]
        lines += [f"without drafts: {format_summary(self.plain)}", f"with drafts:    {format_summary(self.drafted)}"]
        ways = Counter(difference.way for difference in self.differences)
        lines.append(f"different answers: {len(self.differences)} {dict(ways) or ''}")
        return "\n".join([*lines, *(f"  {difference}" for difference in self.differences)])

    def record(self) -> dict[str, object]:
        return {
            "temperature": self.temperature,
            "plain": [*map(record, self.plain)],
            "drafted": [*map(record, self.drafted)],
            "differences": [*map(asdict, self.differences)],
        }


def compare(
    questions: list[Question],
    model: str,
    method: str,
    temperatures: list[float],
    max_tokens: int,
    concurrency: int,
    *,
    always_drafts: bool,
) -> list[Comparison]:
    """With `always_drafts`, questions come in groups, because steps with prompts propose no drafts."""
    search_path = filter(None, (str(ALWAYS_DRAFT_DIRECTORY), os.environ.get("PYTHONPATH")))
    environment = {"PYTHONPATH": os.pathsep.join(search_path)} if always_drafts else {}
    with run_own_server(model, *DRAFT_FLAGS[method], environment=environment) as url:
        drafted = [
            ask_all(Client(url, max_tokens, temperature), questions, concurrency, in_groups=always_drafts)
            for temperature in temperatures
        ]
    comparisons: list[Comparison] = []
    with run_own_server(model, *PLAIN_FLAGS) as url:
        for temperature, outcomes in zip(temperatures, drafted, strict=True):
            client = Client(url, max_tokens, temperature)
            plain = ask_all(client, questions, concurrency)
            comparisons.append(Comparison(temperature, plain, outcomes, find_differences(client, plain, outcomes)))
    return comparisons


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=1000, help="questions, evenly spread over corpora and ways")
    parser.add_argument("--model", default=MODEL_NAME, help="checkpoint directory, by default the default model")
    parser.add_argument("--speculate", choices=DRAFT_FLAGS, default="ngram", help="what proposes drafts")
    parser.add_argument("--always", action="store_true", help="propose drafts also where they cost more than they save")
    parser.add_argument("--corpus", nargs="+", choices=CORPORA, default=["tools"])
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS), help="how a request uses a schema")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 0.7])
    parser.add_argument("--cases", type=Path, help="read the corpora from a file that ask.py --save wrote")
    parser.add_argument("--outcomes", type=Path, help="write all outcomes and differences to a file, as JSON")
    options = parser.parse_args()
    questions = spread(make_questions(read_cases(options.cases), options.corpus, options.way, None), options.number)
    comparisons = compare(
        questions,
        options.model,
        options.speculate,
        options.temperature,
        options.max_tokens,
        options.concurrency,
        always_drafts=options.always,
    )
    for comparison in comparisons:
        print(comparison.describe())
    if options.outcomes is not None:
        options.outcomes.write_text(json.dumps([comparison.record() for comparison in comparisons]))
    return int(not all(comparison.is_good for comparison in comparisons))


if __name__ == "__main__":
    sys.exit(main())
