"""What answers may look like: grammars compiled off the event loop, and where each answer stands in its own."""
