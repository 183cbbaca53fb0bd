"""Reads the request field `kv_transfer_params`, with which a router connects a prefill server and a decode server."""

from dataclasses import dataclass

from nanovllm_server.protocol.field_reader import FieldReader
from nanovllm_server.protocol.network_address import MAX_PORT

TRANSFER_PARAMS_FIELD = "kv_transfer_params"
MAX_HOST_LENGTH = 255
# Fields of vLLM's connectors that have no effect here: a decode server finds blocks by hashes.
IGNORED_FIELDS = ("remote_engine_id", "remote_block_ids", "remote_request_id", "tp_size", "remote_num_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferParams:
    """The field `kv_transfer_params` of a request.

    do_remote_decode: another server will generate the answer, and fetch the prompt's KV blocks from this server.
    do_remote_prefill: another server has computed the prompt.
    remote_host, remote_port: address of the server that has computed the prompt; None if absent.
    """

    do_remote_decode: bool
    do_remote_prefill: bool
    remote_host: str | None
    remote_port: int | None


def parse_transfer_params(body: FieldReader) -> TransferParams | None:
    """Reads the field. Returns None if the field is absent or an empty object. Raises ApiError (400)."""
    fields = body.child(TRANSFER_PARAMS_FIELD)
    if fields is None or not body.raw(TRANSFER_PARAMS_FIELD):
        return None
    # These fields have no effect. They are read only so that the API's description lists them.
    for name in IGNORED_FIELDS:
        fields.raw(name)
    params = TransferParams(
        do_remote_decode=fields.boolean("do_remote_decode") or False,
        do_remote_prefill=fields.boolean("do_remote_prefill") or False,
        remote_host=fields.text("remote_host", MAX_HOST_LENGTH),
        remote_port=fields.integer("remote_port", 1, MAX_PORT),
    )
    if params.do_remote_prefill:
        for name, value in (("remote_host", params.remote_host), ("remote_port", params.remote_port)):
            if value is None:
                raise fields.wrong(name, "set when do_remote_prefill is true")
    return params
