"""OpenAI's Responses API, with conversations and a bounded store."""
