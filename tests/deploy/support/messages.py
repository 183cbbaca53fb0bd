"""Parts of messages that `docs/deploy/troubleshooting.md` quotes and several tests provoke."""

BODY_IS_TOO_LARGE = "the body may have at most"
IS_DRAINING = "the server is shutting down"
IS_STOPPED = "the server is not running"
NO_DEFAULT_MODEL = "no model was named and the package with the default model is not installed"
WORKER_HANGS = "HTTP worker does not respond"
WORKER_DIED = "HTTP worker died"
WORKER_IS_NOT_REPLACED = "an HTTP worker can't be replaced"
