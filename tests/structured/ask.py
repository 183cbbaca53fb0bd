"""`python tests/structured/ask.py`: asks a server for answers to every schema of all corpora, and prints a table.

Without `--url` it starts a server with the default model. It exits with 1 if an answer does not validate, is an error,
or would never end. Corpora come from installed packages; `--save FILE` writes them, so that `--cases FILE` can read
them on another machine.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from asking import FAILURES, VERDICTS, WAYS, Client, NamedSchema, Outcome, Question, Way
from tqdm import tqdm

CORPORA = ("suite", "tools", "real")
OUTCOME_FIELDS = ("verdict", "detail", "text", "tokens", "seconds", "token_ids", "accepted_drafts", "rejected_drafts")
MAX_OFFERED_FUNCTIONS = 4


def read_cases(path: Path | None) -> list[NamedSchema]:
    if path is not None:
        return [NamedSchema(**case) for case in json.loads(path.read_text())]
    from corpora import CORPUS_LOADERS

    return [NamedSchema(name, case.name, case.schema) for name in CORPORA for case in CORPUS_LOADERS[name]()]


def make_questions(cases: list[NamedSchema], corpora: list[str], ways: list[Way], limit: int | None) -> list[Question]:
    questions: list[Question] = []
    for corpus in corpora:
        chosen = [case for case in cases if case.corpus == corpus]
        chosen = chosen[:: max(1, len(chosen) // limit)][:limit] if limit else chosen
        objects = [case for case in chosen if isinstance(case.schema, dict)]
        num_offered = MAX_OFFERED_FUNCTIONS if corpus == "tools" else 1
        for way in ways:
            match way:
                case "answer":
                    questions += [Question(way, (case,)) for case in chosen]
                case "named":
                    questions += [Question(way, (case,)) for case in objects]
                case "required":
                    groups = [objects[begin : begin + num_offered] for begin in range(0, len(objects), num_offered)]
                    questions += [Question(way, tuple(group)) for group in groups]
    return questions


@contextmanager
def run_own_server(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    command = [sys.executable, "-m", "nanovllm_server", "--port", "0", "--log-level", "warning", *arguments]
    variables = {**os.environ, **(environment or {})}
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = next((found[0] for line in process.stdout if (found := re.findall(r"http://\S+:\d+", line))), None)
            if url is None:
                raise RuntimeError(f"the server ended with status {process.wait()}")
            yield url
        finally:
            process.terminate()


def ask_all(client: Client, questions: list[Question], concurrency: int, *, in_groups: bool = False) -> list[Outcome]:
    """in_groups: send the next `concurrency` questions only when all earlier questions are answered."""
    outcomes: dict[int, Outcome] = {}
    group_size = concurrency if in_groups else max(len(questions), 1)
    pool = ThreadPoolExecutor(concurrency)
    try:
        with tqdm(total=len(questions), desc="asking", unit="answer") as bar:
            for begin in range(0, len(questions), group_size):
                group = enumerate(questions[begin : begin + group_size], begin)
                waiting = {pool.submit(client.ask, question, seed): seed for seed, question in group}
                for done in as_completed(waiting):
                    outcome = outcomes[waiting[done]] = done.result()
                    bar.update()
                    if outcome.verdict in FAILURES:
                        bar.write(format_failure(outcome))
    finally:
        # After an interrupt, wait only for requests that were already sent.
        pool.shutdown(cancel_futures=True)
    return [outcomes[index] for index in range(len(questions))]


def format_failure(outcome: Outcome) -> str:
    names = ", ".join(each.name for each in outcome.question.schemas)
    end = outcome.text if len(outcome.text) < 300 else "..." + outcome.text[-300:]
    return f"{outcome.verdict.upper()} {outcome.question.way} {names}: {outcome.detail} {end!r}"


def format_table(outcomes: list[Outcome]) -> str:
    rows = [["corpus", "asked as", *VERDICTS, "all", "tokens of valid"]]
    groups = dict.fromkeys((outcome.question.corpus, outcome.question.way) for outcome in outcomes)
    for corpus, way in groups:
        chosen = [each for each in outcomes if (each.question.corpus, each.question.way) == (corpus, way)]
        rows.append([corpus, way, *_format_numbers(chosen)])
    rows.append(["all", "", *_format_numbers(outcomes)])
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _format_numbers(outcomes: list[Outcome]) -> list[str]:
    counts = Counter(outcome.verdict for outcome in outcomes)
    lengths = [outcome.tokens for outcome in outcomes if outcome.verdict == "valid"]
    mean = f"{sum(lengths) / len(lengths):.1f}" if lengths else "-"
    return [*(str(counts[verdict]) for verdict in VERDICTS), str(len(outcomes)), mean]


def record(outcome: Outcome) -> dict[str, object]:
    question = outcome.question
    return {
        "corpus": question.corpus,
        "way": question.way,
        "names": [each.name for each in question.schemas],
        **{name: getattr(outcome, name) for name in OUTCOME_FIELDS},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="URL of a running server, such as http://127.0.0.1:8000")
    parser.add_argument("--corpus", nargs="+", choices=CORPORA, default=list(CORPORA))
    parser.add_argument("--way", nargs="+", choices=WAYS, default=list(WAYS), help="how a request uses a schema")
    parser.add_argument("--limit", type=int, help="schemas of each corpus, evenly spread")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--cases", type=Path, help="read the corpora from a file that --save wrote")
    parser.add_argument("--save", type=Path, help="write the corpora to a file, and ask nothing")
    parser.add_argument("--outcomes", type=Path, help="write every outcome to a file, as JSON")
    options = parser.parse_args()
    cases = read_cases(options.cases)
    if options.save is not None:
        options.save.write_text(json.dumps([asdict(case) for case in cases]))
        return 0
    questions = make_questions(cases, options.corpus, options.way, options.limit)
    if options.url is not None:
        outcomes = ask_all(Client(options.url, options.max_tokens, options.temperature), questions, options.concurrency)
    else:
        with run_own_server() as url:
            outcomes = ask_all(Client(url, options.max_tokens, options.temperature), questions, options.concurrency)
    print(format_table(outcomes))
    if options.outcomes is not None:
        options.outcomes.write_text(json.dumps([record(outcome) for outcome in outcomes]))
    num_cut_by_part = Counter(outcome.detail for outcome in outcomes if outcome.verdict in ("cut", "run away"))
    print("cut inside:", ", ".join(f"{name} {count}" for name, count in num_cut_by_part.most_common()) or "nothing")
    return int(any(outcome.verdict in FAILURES for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
