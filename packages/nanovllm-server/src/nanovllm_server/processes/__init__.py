"""The processes of a server: the parent, the HTTP workers, and the memory that workers share."""
