"""The generated parts of the documentation, and the command that writes them: ``python -m tests.docs``."""
