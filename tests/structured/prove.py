"""`python tests/structured/prove.py [WALKS]`: runs the proof over all corpora and prints a table."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import corpora
from proof import prove
from walks import default_walker


def main() -> int:
    """Print the outcomes for each corpus; returns 1 if anything is wrong."""
    walks = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    names = [name for name in sys.argv[2:] if name != "-v"] or ["suite", "tools", "real"]
    walker = default_walker()
    failed = False
    for name in names:
        cases = {"suite": corpora.suite, "tools": corpora.tools, "real": corpora.real}[name]()
        report = prove(walker, cases, walks)
        seconds = {key: round(value, 1) for key, value in report.seconds.items()}
        print(f"{name}: {len(cases)} schemas, {dict(report.counts)}, seconds {seconds}", flush=True)
        print("  refused by:", ", ".join(f"{keyword} {count}" for keyword, count in report.refused.most_common()))
        for line in report.slow:
            print("  SLOW", line)
        if "-v" in sys.argv:
            for line in report.refusals:
                print("  REFUSED", line[:300])
        for line in report.wrong:
            print("  WRONG", line, flush=True)
        failed = failed or bool(report.wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
