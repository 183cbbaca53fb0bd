"""The engine's loop and public interface, and the server and the client of an engine in another process."""
