"""Applies `kv_transfer_params`: finds the engine that has computed a prompt, or describes a computed prompt."""

from nanovllm_core.engine.status import EngineInfo
from nanovllm_server.protocol.bodies import KVTransferParams
from nanovllm_server.protocol.error import bad_field, unsupported
from nanovllm_server.protocol.network_address import join_address, split_address
from nanovllm_server.protocol.transfer_params import TRANSFER_PARAMS_FIELD, TransferParams
from nanovllm_server.settings import Role

HOST_FIELD = f"{TRANSFER_PARAMS_FIELD}.remote_host"


def find_prefix_peer(params: TransferParams | None, role: Role | None, info: EngineInfo) -> str:
    """Returns the address of the engine that has computed the prompt; "" if this server must compute the prompt.

    Raises: ApiError (400) if the server's role does not allow the request, or if `params` name an unknown address.
    """
    if params is None:
        return ""
    if role is None:
        raise unsupported(
            TRANSFER_PARAMS_FIELD,
            f"{TRANSFER_PARAMS_FIELD} is not supported: leave it out or set it to {{}}, or start the server with "
            "--role",
        )
    if role == "prefill" and params.do_remote_prefill:
        message = "is not supported: this server computes prompts, so send the request to a server with --role decode"
        raise unsupported(
            f"{TRANSFER_PARAMS_FIELD}.do_remote_prefill", f"{TRANSFER_PARAMS_FIELD}.do_remote_prefill {message}"
        )
    if role == "decode" and params.do_remote_decode:
        message = "is not supported: this server generates answers, so send the request to a server with --role prefill"
        raise unsupported(
            f"{TRANSFER_PARAMS_FIELD}.do_remote_decode", f"{TRANSFER_PARAMS_FIELD}.do_remote_decode {message}"
        )
    if not params.do_remote_prefill:
        return ""
    try:
        peer = join_address(params.remote_host or "", params.remote_port or 0)
    except ValueError:
        raise bad_field(HOST_FIELD, "a name or an IP address", params.remote_host) from None
    if peer not in info.transfer_peers:
        # Do not list the peers: their addresses may be private.
        expected = "together with remote_port, one of the server's --transfer-peers"
        raise bad_field(HOST_FIELD, expected, f"{params.remote_host} with port {params.remote_port}")
    return peer


def describe_prompt(info: EngineInfo, host: str, response_id: str, num_prompt_tokens: int) -> KVTransferParams:
    """Returns the field `kv_transfer_params` of an answer, which a router sends to a decode server.

    host: value of `remote_host`, the host at which decode servers reach this server's engine.
    """
    _, port = split_address(info.transfer_address)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": info.transfer_engine_id,
        "remote_block_ids": [],
        "remote_request_id": response_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": info.num_ranks,
        "remote_num_tokens": num_prompt_tokens,
    }
