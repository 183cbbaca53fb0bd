"""The program `support/random_traces.py` runs more traces."""

import pytest
from random_traces import check_block_of_traces

pytestmark = pytest.mark.background


@pytest.mark.parametrize(("seed_block_index", "num_groups"), [(0, 1), (1, 3)])
def test_every_request_finishes_with_the_expected_tokens_and_releases_everything(seed_block_index, num_groups):
    check_block_of_traces(seed_block_index, num_groups)
