"""Everything of Troupe that touches a tensor. No imports and no version here: transformers looks at this module."""
