"""Random faults in KV blocks on disk change no answer; the program `support/tier_faults.py` injects more of them."""

import pytest
from tier_faults import run_campaign


@pytest.mark.parametrize("name", ["Llama, tied", "Qwen3-Next", "DeepSeek-V3"])
def test_faults_on_disk_change_no_answer(name):
    totals = run_campaign(name, num_faults=11, seed=0)
    # Each kind of fault occurs. Most prefixes come from below, and a new process finds the files of the killed one.
    assert totals["num_cached_tokens"] > totals["num_prompt_tokens"] / 4, totals
    assert totals["num_cached_tokens_after_restart"] > 0, totals
