"""The command `conversations`: how fast a server answers conversations that return after a pause."""
