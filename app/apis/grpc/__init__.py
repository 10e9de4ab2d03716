"""SGLang's gRPC service, with gRPC's health and reflection."""
