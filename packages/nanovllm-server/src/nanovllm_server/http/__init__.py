"""HTTP: routes, connections, admission, server-sent events and the chat page."""
