"""Models that run transformers' own modeling code over our paged cache (``--model-impl transformers``)."""
