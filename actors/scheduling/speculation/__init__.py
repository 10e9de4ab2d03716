"""Which decodes of a step draft, and how many tokens: limits by row (``draft_limits``) and the adaptive policy."""
