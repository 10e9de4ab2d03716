"""The adapters in the box and their training."""
