"""OpenAI's embeddings, over the engine's task."""
