"""HTTP: routes, connections, checks of headers, server-sent events and the chat page."""
