"""Sort keys of requests. Lower keys come first."""

from nanovllm_core.request_state import RequestState

SortKey = tuple[int, int, float]


def request_class(request: RequestState) -> tuple[int, int]:
    """The service class: preempted requests before new requests, then by priority."""
    return (0 if request.num_preemptions else 1, request.client_request.priority)


def admission_order(request: RequestState) -> SortKey:
    """Sort key of waiting requests: by service class, then by arrival."""
    return (*request_class(request), request.client_request.arrival_time)


def urgency_order(request: RequestState) -> tuple[int, float]:
    """Sort key of running requests: by priority, then by arrival."""
    return (request.client_request.priority, request.client_request.arrival_time)


def preemption_order(request: RequestState, *, is_prefilling: bool) -> SortKey:
    """Sort key for preemption, highest key first: prefills before decodes, then less urgent requests first."""
    return (int(is_prefilling), *urgency_order(request))
