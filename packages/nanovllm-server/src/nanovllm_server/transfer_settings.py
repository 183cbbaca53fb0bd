"""Makes settings from the flags for prefill and decode on different GPUs."""

import argparse
import itertools
import os
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from nanovllm_core.config import Device
from nanovllm_server.protocol.network_address import join_address, split_address
from nanovllm_server.settings import SettingsError, TransferSettings

DEFAULT_LISTEN = "127.0.0.1:5600"
# Default of --kv-offload-gib for servers that transfer blocks.
DEFAULT_OFFLOAD_GIB_ON_GPU = 8.0
DEFAULT_OFFLOAD_GIB_ON_CPU = 0.5
# NVIDIA's driver creates these files if there are GPUs. Importing torch only to find GPUs would take seconds.
NVIDIA_DEVICE = Path("/dev/nvidiactl")
NVIDIA_GPU_PATTERN = "nvidia[0-9]*"
GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"

_LISTEN_FLAG, _HOST_FLAG, _PEERS_FLAG = "--transfer-listen", "--transfer-host", "--transfer-peers"
_SECRET_FILE_FLAG, _CARRIER_FLAG = "--transfer-secret-file", "--transfer-carrier"


def read_transfer_flags(options: argparse.Namespace) -> tuple[TransferSettings, dict[str, Any]]:
    """Returns (settings, values that replace fields of `EngineConfig`). Raises SettingsError."""
    given_flags = _find_given_flags(options)
    if (options.prefill_gpus is None) != (options.decode_gpus is None):
        raise SettingsError("--prefill-gpus and --decode-gpus start two engines: set both, or neither")
    if options.prefill_gpus is not None:
        return _read_engine_pair(options, given_flags)
    if options.role is not None:
        return _read_role(options, given_flags)
    if given_flags:
        raise SettingsError(f"{given_flags[0]} needs --role: add --role, or leave out {given_flags[0]}")
    return TransferSettings(), {}


def has_gpu(device: Device | None) -> bool:
    """Whether the engine may use a GPU. device: the device that the user chose; None without a choice."""
    return device != "cpu" and NVIDIA_DEVICE.exists() and bool(_find_gpus())


def _find_given_flags(options: argparse.Namespace) -> list[str]:
    """Returns those --transfer-* flags that have other values than their defaults."""
    values = {
        _LISTEN_FLAG: options.transfer_listen,
        _HOST_FLAG: options.transfer_host,
        _PEERS_FLAG: options.transfer_peer_lists,
        _SECRET_FILE_FLAG: getattr(options, "transfer_secret_file", None),
        _CARRIER_FLAG: None if options.transfer_carrier == "auto" else options.transfer_carrier,
    }
    return [flag for flag, value in values.items() if value is not None]


def _read_engine_pair(options: argparse.Namespace, given_flags: list[str]) -> tuple[TransferSettings, dict[str, Any]]:
    num_ranks = options.prefill_gpus
    if options.decode_gpus != num_ranks:
        raise SettingsError(
            f"--prefill-gpus is {num_ranks} and --decode-gpus is {options.decode_gpus}: both must be the same number"
        )
    excluded = [flag for flag in given_flags if flag != _CARRIER_FLAG]
    if options.role is not None:
        excluded.append("--role")
    if options.tensor_parallel_size != 1:
        excluded.append("--tensor-parallel-size")
    if excluded:
        raise SettingsError(f"{excluded[0]} has no effect with --prefill-gpus: leave out {excluded[0]}")
    overrides: dict[str, Any] = {"tensor_parallel_size": num_ranks}
    overrides |= _choose_host_memory(options, "--prefill-gpus")
    if not has_gpu(_chosen_device(options)):
        return TransferSettings(has_prefill_engine=True), overrides
    gpus = _find_gpus()
    if len(gpus) < 2 * num_ranks:
        raise SettingsError(
            f"--prefill-gpus {num_ranks} and --decode-gpus {num_ranks} need {2 * num_ranks} GPUs, but this server may "
            f"use {len(gpus)}: use smaller numbers, or set {GPU_VARIABLE}"
        )
    # Without this setting, an engine whose GPUs are unusable would silently run on the CPU.
    overrides["device"] = "cuda"
    prefill_gpus, decode_gpus = gpus[:num_ranks], gpus[num_ranks : 2 * num_ranks]
    settings = TransferSettings(
        has_prefill_engine=True, prefill_gpus=",".join(prefill_gpus), decode_gpus=",".join(decode_gpus)
    )
    return settings, overrides


def _read_role(options: argparse.Namespace, given_flags: list[str]) -> tuple[TransferSettings, dict[str, Any]]:
    role, is_prefill = options.role, options.role == "prefill"
    for flag in (_PEERS_FLAG,) if is_prefill else (_LISTEN_FLAG, _HOST_FLAG):
        if flag in given_flags:
            raise SettingsError(f"{flag} has no effect with --role {role}: leave out {flag}")
    if _SECRET_FILE_FLAG not in given_flags:
        raise SettingsError(
            f"--role needs {_SECRET_FILE_FLAG}: a file with a secret of at least 32 bytes, which all servers of a "
            "router share"
        )
    overrides = _choose_host_memory(options, "--role")
    if is_prefill:
        host, port = _parse_address(_LISTEN_FLAG, options.transfer_listen or DEFAULT_LISTEN)
        overrides["transfer_listen"] = join_address(host, port)
        advertised_host = _choose_advertised_host(host, options.transfer_host)
        return TransferSettings(role=role, advertised_host=advertised_host), overrides
    peers = [peer.strip() for value in options.transfer_peer_lists or () for peer in value.split(",") if peer.strip()]
    if not peers:
        raise SettingsError(f"--role decode needs {_PEERS_FLAG}: HOST:PORT of each prefill server")
    addresses = [_parse_address(_PEERS_FLAG, peer) for peer in peers]
    # Write all addresses in one form: the engine compares them, as text, with the addresses in requests.
    overrides["transfer_peers"] = tuple(dict.fromkeys(join_address(*address) for address in addresses))
    return TransferSettings(role=role), overrides


def _choose_host_memory(options: argparse.Namespace, transfer_flag: str) -> dict[str, Any]:
    if not getattr(options, "prefix_caching", True):
        raise SettingsError(f"{transfer_flag} needs the prefix cache: leave out --no-prefix-caching")
    if "kv_offload_gib" in options:
        if options.kv_offload_gib <= 0:
            raise SettingsError(
                f"{transfer_flag} needs host memory, but --kv-offload-gib is {options.kv_offload_gib:g}: set it above "
                "0, or leave it out"
            )
        return {}
    on_gpu = has_gpu(_chosen_device(options))
    return {"kv_offload_gib": DEFAULT_OFFLOAD_GIB_ON_GPU if on_gpu else DEFAULT_OFFLOAD_GIB_ON_CPU}


def _chosen_device(options: argparse.Namespace) -> Device | None:
    return None if options.device == "auto" else options.device


def _find_gpus() -> list[str]:
    """Returns the names of the GPUs that the server may use, as CUDA_VISIBLE_DEVICES lists them."""
    variable = os.environ.get(GPU_VARIABLE)
    if variable is not None:
        gpus = [gpu.strip() for gpu in variable.split(",") if gpu.strip()]
        # CUDA ignores the first -1 and all names after it.
        return list(itertools.takewhile(lambda gpu: gpu != "-1", gpus))
    return [str(index) for index, _ in enumerate(NVIDIA_DEVICE.parent.glob(NVIDIA_GPU_PATTERN))]


def _parse_address(flag: str, address: str) -> tuple[str, int]:
    if address.startswith("ipc:"):
        raise SettingsError(
            f"{flag} is {address}, but must be HOST:PORT: the request field kv_transfer_params has a host and a port"
        )
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise SettingsError(f"{flag}: {error}") from error
    if port == 0 and flag == _PEERS_FLAG:
        raise SettingsError(f"{flag} is {address}, but must have the port of a prefill server")
    return host, port


def _choose_advertised_host(listen_host: str, advertised_host: str | None) -> str:
    if advertised_host is None:
        if _is_wildcard(listen_host):
            raise SettingsError(
                f"{_LISTEN_FLAG} {listen_host} is not an address that decode servers can connect to: add {_HOST_FLAG} "
                "with this host's name or address"
            )
        return listen_host
    try:
        join_address(advertised_host, 0)
    except ValueError as error:
        raise SettingsError(f"{_HOST_FLAG}: {error}") from error
    return advertised_host


def _is_wildcard(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False
