"""Each schema is refused, or everything that its grammar permits meets the schema: a sample of prove.py's run."""

import json

import corpora
import pytest
from proof import prove
from walks import default_walker

pytestmark = pytest.mark.background


@pytest.fixture(scope="module")
def walker():
    return default_walker()


def check(report, *, accepted: float) -> None:
    assert report.wrong == []
    judged = report.counts["accepted"] + report.counts["refused"]
    assert report.counts["accepted"] >= accepted * judged, report.refused


def test_official_suite(walker):
    report = prove(walker, corpora.suite(), 2)
    check(report, accepted=0.8)
    # A grammar may permit less than its schema, but it should permit most of the suite's valid values.
    assert report.counts["valid permitted"] >= 0.5 * report.counts["valid"]


def test_tools_as_people_write_them(walker):
    cases = corpora.tools()
    check(prove(walker, cases[::4], 1), accepted=0.98)
    check(prove(walker, cases[2::20], 1, tag=True), accepted=0.98)


def test_schemas_of_packages(walker):
    # Each of the largest schemas takes seconds to compile.
    cases = [case for case in corpora.real() if len(json.dumps(case.schema)) < 20_000]
    check(prove(walker, cases[::6], 1), accepted=0.8)
