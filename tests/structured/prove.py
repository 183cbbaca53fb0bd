"""`python tests/structured/prove.py [--walks N] [--corpus NAME ...] [-v]`: runs the proof over corpora of schemas."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from corpora import CORPUS_LOADERS
from proof import prove
from walks import default_walker


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--walks", type=int, default=20, help="texts that each schema's grammar generates")
    parser.add_argument("--corpus", nargs="+", choices=CORPUS_LOADERS, default=list(CORPUS_LOADERS))
    parser.add_argument("-v", action="store_true", dest="is_verbose", help="print refused schemas")
    arguments = parser.parse_args()
    walker = default_walker()
    failed = False
    for name in arguments.corpus:
        cases = CORPUS_LOADERS[name]()
        report = prove(walker, cases, arguments.walks)
        seconds = {key: round(value, 1) for key, value in report.seconds.items()}
        print(f"{name}: {len(cases)} schemas, {dict(report.counts)}, seconds {seconds}", flush=True)
        print("  refused by:", ", ".join(f"{keyword} {count}" for keyword, count in report.refused.most_common()))
        for line in report.slow:
            print("  SLOW", line)
        if arguments.is_verbose:
            for line in report.refusals:
                print("  REFUSED", line[:300])
        for line in report.wrong:
            print("  WRONG", line, flush=True)
        failed = failed or bool(report.wrong)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
