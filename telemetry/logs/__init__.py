"""Log records, their output, and the logs of requests and steps."""
