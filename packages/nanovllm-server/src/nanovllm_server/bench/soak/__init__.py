"""The command `soak`: random traffic against a running server, and checks of its memory."""
