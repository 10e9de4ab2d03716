"""The stage: what the actors and the requests of this server are doing now, for the live page."""
