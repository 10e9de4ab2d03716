"""SGLang's native API."""
