"""Reference implementations of torch_npu's fused operators, one for each overload that the engine uses, by topic."""
