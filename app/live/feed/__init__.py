"""The feed of the live page: the actors and requests of this server."""
