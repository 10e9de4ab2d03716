"""Ranking, scoring and classifying in the forms of vLLM, SGLang, Jina and Cohere, over the engine's tasks."""
