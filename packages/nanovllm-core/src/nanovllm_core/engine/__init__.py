"""The engine's loop, its public interface, and the process and client that run it in another process."""
