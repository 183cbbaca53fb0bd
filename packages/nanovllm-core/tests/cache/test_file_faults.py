"""Random faults in files of KV blocks. The program `support/file_faults.py` injects more faults."""

from collections import Counter

import pytest
from directory_faults import FAULTS
from file_faults import run_campaign

pytestmark = pytest.mark.background

EXPECTED_EVENTS = [*FAULTS, "kill", "num_hits", "num_corrupt", "num_write_errors", "num_evicted"]


def test_random_faults_give_no_wrong_payload_and_no_error():
    totals = Counter()
    # On a busy machine, a campaign may lack an event.
    for seed in range(1, 4):
        totals.update(run_campaign(num_faults=60, seed=seed))
        if all(totals[name] for name in EXPECTED_EVENTS):
            break
    assert all(totals[name] for name in EXPECTED_EVENTS), totals
