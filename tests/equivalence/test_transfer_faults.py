"""Random faults between engines change no answer; the program `support/transfer_faults.py` injects more of them."""

import pytest
from transfer_faults import FAULTS, run_campaign
from transfer_pairs import CARRIERS

MAX_ANSWER_S = 30.0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "carrier"), [("Qwen3-Next", CARRIERS[0])])
def test_faults_between_engines_change_no_answer(name, carrier):
    totals = run_campaign(name, carrier, num_faults=len(FAULTS), seed=0, max_answer_s=MAX_ANSWER_S).totals
    assert all(totals[fault] == 1 for fault in FAULTS)
    assert totals["fetched_tokens"] > 0, totals
