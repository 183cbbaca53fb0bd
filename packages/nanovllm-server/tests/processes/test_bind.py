import re
import socket

import pytest

from nanovllm_server.processes.server import bind
from nanovllm_server.settings import SettingsError


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_a_host_that_is_no_name_is_an_error_of_the_settings(host):
    with pytest.raises(SettingsError, match=f"can't listen on {host}"):
        bind(host, 0, 1)


def test_error_of_a_port_in_use_names_the_flag():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = f"can't listen on 127.0.0.1 port {port}: Address already in use; pass another --port or --host"
        with pytest.raises(SettingsError, match=re.escape(message)):
            bind("127.0.0.1", port, 1)
