"""OpenAI's API: models, completions, chat completions."""
