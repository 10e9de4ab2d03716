"""What the understudy is taught, one subject a file."""
