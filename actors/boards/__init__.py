"""State that actors write and others read without a message: journal, stream buffers, health board."""
