"""Runs the proof of prove.py with fewer schemas and walks."""

import json

import corpora
import pytest
from proof import prove
from walks import default_walker

pytestmark = pytest.mark.background


@pytest.fixture(scope="module")
def walker():
    return default_walker()


def check(report, *, min_accepted_share: float) -> None:
    assert report.wrong == []
    num_judged = report.counts["accepted"] + report.counts["refused"]
    assert report.counts["accepted"] >= min_accepted_share * num_judged, report.refused


def test_grammars_of_the_official_suite_permit_only_valid_values(walker):
    report = prove(walker, corpora.load_suite(), 2)
    check(report, min_accepted_share=0.8)
    # A grammar may permit less than its schema.
    assert report.counts["valid permitted"] >= 0.5 * report.counts["valid"]


def test_grammars_of_published_tools_permit_only_valid_arguments(walker):
    cases = corpora.load_tool_parameters()
    check(prove(walker, cases[::4], 1), min_accepted_share=0.98)
    check(prove(walker, cases[2::20], 1, tag=True), min_accepted_share=0.98)


def test_grammars_of_schemas_in_packages_permit_only_valid_values(walker):
    # Each of the largest schemas takes seconds to compile.
    cases = [case for case in corpora.load_package_schemas() if len(json.dumps(case.schema)) < 20_000]
    check(prove(walker, cases[::6], 1), min_accepted_share=0.8)
