"""Random faults in copies of KV blocks change no answer; the program `support/tier_faults.py` injects more of them."""

import pytest
from tier_faults import ENGINE_FAULTS, FAULTS, run_campaign


@pytest.mark.slow
@pytest.mark.background
@pytest.mark.parametrize(("name", "min_cached_share"), [("Llama, tied", 0.25), ("Qwen3-Next", 0.1)])
def test_faults_in_tiers_change_no_answer(name, min_cached_share):
    totals = run_campaign(name, num_faults=len(FAULTS) + len(ENGINE_FAULTS), seed=0)
    assert totals["num_cached_tokens"] > totals["num_prompt_tokens"] * min_cached_share, totals
    assert totals["num_cached_tokens_after_restart"] > 0, totals
