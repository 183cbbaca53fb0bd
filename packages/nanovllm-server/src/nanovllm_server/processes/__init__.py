"""The processes of a server: the parent, the HTTP workers, and the rings in which workers share encodings."""
