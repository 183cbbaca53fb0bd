"""Sort keys of requests."""

from nanovllm_core.request_state import RequestState

SortKey = tuple[int, int, float]


def service_class(request: RequestState) -> tuple[int, int]:
    """The service class. Preempted requests come before all others. Then lower priority numbers come first."""
    return (0 if request.num_preemptions else 1, request.client_request.priority)


def admission_order(request: RequestState) -> SortKey:
    """Sort key of waiting requests: service class, then arrival."""
    return (*service_class(request), request.client_request.arrival_time)


def urgency_order(request: RequestState) -> tuple[int, float]:
    """Sort key of running requests: priority, then arrival."""
    return (request.client_request.priority, request.client_request.arrival_time)
