import pytest

from nanovllm_server.processes.server import bind
from nanovllm_server.settings import SettingsError


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_a_host_that_is_no_name_is_an_error_of_the_settings(host):
    with pytest.raises(SettingsError, match=f"can't listen on {host}"):
        bind(host, 0, 1)
