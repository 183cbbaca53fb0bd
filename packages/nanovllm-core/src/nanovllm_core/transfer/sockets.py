"""Makes the sockets of engines that share blocks."""

import zmq
import zmq.asyncio

from nanovllm_core.transfer.secret import KeyPair

# Maximum bytes of a frame. The largest frames have the bytes of one entry, or the tokens and the hashes of a prompt.
MAX_MESSAGE_BYTES = 256 << 20
# ZeroMQ reconnects if the other side does not answer for HEARTBEAT_TIMEOUT_MS.
HEARTBEAT_INTERVAL_MS, HEARTBEAT_TIMEOUT_MS = 1000, 3000


def make_socket(context: zmq.asyncio.Context, socket_type: int, keys: KeyPair) -> zmq.asyncio.Socket:
    """An encrypted socket that queues messages without limit. keys: the keys of this side of the connection."""
    socket = context.socket(socket_type)
    socket.curve_publickey, socket.curve_secretkey = keys
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.SNDHWM, 0),
        (zmq.RCVHWM, 0),
        (zmq.IPV6, 1),
        (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
        (zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS),
        (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
    ):
        socket.setsockopt(option, value)
    return socket


def endpoint_of(address: str) -> str:
    """The ZeroMQ endpoint of HOST:PORT or ipc:///PATH."""
    return address if address.startswith("ipc://") else f"tcp://{address}"
