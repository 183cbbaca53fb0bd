"""Random faults in files of KV blocks. The program `support/file_faults.py` injects more faults."""

import pytest
from directory_faults import FAULTS
from file_faults import run_campaign

pytestmark = pytest.mark.background


def test_random_faults_give_no_wrong_payload_and_no_error():
    totals = run_campaign(num_faults=60, seed=1)
    assert all(totals[name] for name in [*FAULTS, "kill"]), totals
    for name in ("num_hits", "num_corrupt", "num_write_errors", "num_evicted"):
        assert totals[name] > 0, totals
