"""OpenAI's files and batches, kept in a directory (``--file-storage-path``)."""
