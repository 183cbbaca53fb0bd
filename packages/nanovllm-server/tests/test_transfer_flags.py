"""The flags for prefill and decode on different GPUs."""

import socket
from pathlib import Path

import pytest

from nanovllm_core import EngineConfig
from nanovllm_server import cli, transfer_settings
from nanovllm_server.settings import Settings, SettingsError, TransferSettings

SECRET = "--transfer-secret-file secret"


def parse(arguments: str) -> Settings:
    return cli.make_settings(cli.make_parser().parse_args(arguments.split()))


@pytest.fixture
def device_directory(tmp_path, monkeypatch) -> Path:
    """An empty directory for device files, as on a machine without GPUs."""
    monkeypatch.setattr(transfer_settings, "NVIDIA_DEVICE", tmp_path / "nvidiactl")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.fixture
def four_gpus(device_directory) -> None:
    for name in ("nvidiactl", "nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidia-uvm"):
        (device_directory / name).touch()


def test_without_flags_nothing_is_transferred():
    settings = parse("")
    assert settings.transfer == TransferSettings()
    assert settings.engine_config == EngineConfig()


def test_prefill_server_listens(device_directory):
    settings = parse(f"--role prefill {SECRET}")
    assert settings.transfer == TransferSettings(role="prefill", advertised_host="127.0.0.1")
    assert settings.engine_config == EngineConfig(
        transfer_listen="127.0.0.1:5600", transfer_secret_file=Path("secret"), kv_offload_gib=0.5
    )


@pytest.mark.parametrize(
    ("flags", "listen", "host"),
    [
        ("--transfer-listen 10.0.0.1:0", "10.0.0.1:0", "10.0.0.1"),
        ("--transfer-listen [::1]:80", "[::1]:80", "::1"),
        ("--transfer-listen Node-1:80", "node-1:80", "Node-1"),
        ("--transfer-listen 0.0.0.0:80 --transfer-host node-1.example.com", "0.0.0.0:80", "node-1.example.com"),
        ("--transfer-listen [::]:80 --transfer-host fd00::1", "[::]:80", "fd00::1"),
    ],
)
def test_prefill_server_names_its_host(flags, listen, host):
    settings = parse(f"--role prefill {SECRET} {flags}")
    assert (settings.engine_config.transfer_listen, settings.transfer.advertised_host) == (listen, host)


def test_decode_server_has_peers(device_directory):
    peers = "--transfer-peers 10.0.0.1:5600,Node:5601 --transfer-peers [0:0::1]:5602,10.0.0.1:5600"
    settings = parse(f"--role decode {SECRET} {peers} --transfer-carrier tcp --kv-offload-gib 3")
    assert settings.transfer == TransferSettings(role="decode")
    assert settings.engine_config == EngineConfig(
        transfer_peers=("10.0.0.1:5600", "node:5601", "[::1]:5602"),
        transfer_secret_file=Path("secret"),
        transfer_carrier="tcp",
        kv_offload_gib=3,
    )


def test_two_engines_run_on_a_machine_without_gpus(device_directory):
    settings = parse("--prefill-gpus 2 --decode-gpus 2 --transfer-carrier shm")
    assert settings.transfer == TransferSettings(has_prefill_engine=True)
    assert settings.engine_config == EngineConfig(tensor_parallel_size=2, kv_offload_gib=0.5, transfer_carrier="shm")


@pytest.mark.parametrize(("variable", "gpus"), [(None, ("0,1", "2,3")), ("7, 5,GPU-a,6,4", ("7,5", "GPU-a,6"))])
def test_two_engines_share_the_visible_gpus(four_gpus, monkeypatch, variable, gpus):
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    settings = parse("--prefill-gpus 2 --decode-gpus 2")
    assert (settings.transfer.prefill_gpus, settings.transfer.decode_gpus) == gpus
    assert settings.engine_config == EngineConfig(device="cuda", tensor_parallel_size=2, kv_offload_gib=8)
    assert parse("--prefill-gpus 3 --decode-gpus 3 --device cpu").transfer.prefill_gpus is None


@pytest.mark.parametrize("variable", ["", "-1", "-1,0,1"])
def test_two_engines_run_on_the_cpu_if_no_gpu_is_visible(four_gpus, monkeypatch, variable):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    settings = parse("--prefill-gpus 1 --decode-gpus 1")
    assert settings.transfer == TransferSettings(has_prefill_engine=True)
    assert settings.engine_config.kv_offload_gib == 0.5


def test_too_few_gpus_are_an_error(four_gpus, monkeypatch):
    with pytest.raises(SettingsError, match="need 6 GPUs, but this server may use 4"):
        parse("--prefill-gpus 3 --decode-gpus 3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(SettingsError, match="need 2 GPUs, but this server may use 1"):
        parse("--prefill-gpus 1 --decode-gpus 1")


@pytest.mark.parametrize(("device", "gib"), [("auto", 8), ("cuda", 8), ("cpu", 0.5)])
def test_default_host_memory_depends_on_the_device(four_gpus, device, gib):
    assert parse(f"--role prefill {SECRET} --device {device}").engine_config.kv_offload_gib == gib


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--prefill-gpus 1", "set both, or neither"),
        ("--decode-gpus 1", "set both, or neither"),
        ("--prefill-gpus 1 --decode-gpus 2", "--prefill-gpus is 1 and --decode-gpus is 2: both must be the same"),
        ("--prefill-gpus 1 --decode-gpus 1 --role prefill", "leave out --role"),
        ("--prefill-gpus 2 --decode-gpus 2 -tp 2", "leave out --tensor-parallel-size"),
        ("--prefill-gpus 1 --decode-gpus 1 --transfer-listen a:1", "leave out --transfer-listen"),
        ("--prefill-gpus 1 --decode-gpus 1 --transfer-host a", "leave out --transfer-host"),
        ("--prefill-gpus 1 --decode-gpus 1 --transfer-peers a:1", "leave out --transfer-peers"),
        (f"--prefill-gpus 1 --decode-gpus 1 {SECRET}", "leave out --transfer-secret-file"),
        ("--prefill-gpus 1 --decode-gpus 1 --no-prefix-caching", "leave out --no-prefix-caching"),
        ("--prefill-gpus 1 --decode-gpus 1 --kv-offload-gib 0", "--prefill-gpus needs host memory"),
        ("--transfer-listen a:1", "--transfer-listen needs --role"),
        ("--transfer-host a", "--transfer-host needs --role"),
        ("--transfer-peers a:1", "--transfer-peers needs --role"),
        (SECRET, "--transfer-secret-file needs --role"),
        ("--transfer-carrier tcp", "--transfer-carrier needs --role"),
        ("--role prefill", "--role needs --transfer-secret-file"),
        (f"--role prefill {SECRET} --kv-offload-gib 0", "--kv-offload-gib is 0: set it above"),
        (f"--role decode {SECRET}", "--role decode needs --transfer-peers"),
        (f"--role decode {SECRET} --transfer-peers ,", "--role decode needs --transfer-peers"),
        (f"--role decode {SECRET} --transfer-peers a:1 --transfer-listen a:1", "leave out --transfer-listen"),
        (f"--role decode {SECRET} --transfer-peers a:1 --transfer-host a", "leave out --transfer-host"),
        (f"--role decode {SECRET} --transfer-peers a:1 --no-prefix-caching", "leave out --no-prefix-caching"),
        (f"--role prefill {SECRET} --transfer-peers a:1", "leave out --transfer-peers"),
        (f"--role prefill {SECRET} --transfer-listen 0.0.0.0:1", "add --transfer-host"),
        (f"--role prefill {SECRET} --transfer-listen [::]:1", "add --transfer-host"),
        (f"--role prefill {SECRET} --transfer-listen ipc:///tmp/a", "must be HOST:PORT"),
        (f"--role prefill {SECRET} --transfer-listen a", "'a' is not HOST:PORT"),
        (f"--role prefill {SECRET} --transfer-listen ::1:80", "'::1:80' is not HOST:PORT"),
        (f"--role prefill {SECRET} --transfer-listen a:65536", "no port from 0 to 65535"),
        (f"--role prefill {SECRET} --transfer-listen [a]:1", "--transfer-listen: "),
        (f"--role prefill {SECRET} --transfer-host a:1", "--transfer-host: "),
        (f"--role prefill {SECRET} --transfer-host a/b", "'a/b' is neither a name nor an IP address"),
        (f"--role decode {SECRET} --transfer-peers a:1,b:0", "must have the port of a prefill server"),
        (f"--role decode {SECRET} --transfer-peers ipc:///tmp/a", "must be HOST:PORT"),
    ],
)
def test_flags_that_do_not_fit_together_are_an_error(device_directory, flags, reason):
    with pytest.raises(SettingsError) as failure:
        parse(flags)
    assert reason in str(failure.value)


def test_host_name_of_this_machine_can_be_advertised():
    flags = f"--role prefill {SECRET} --transfer-listen 0.0.0.0:0 --transfer-host {socket.gethostname()}"
    assert parse(flags).transfer.advertised_host == socket.gethostname()
