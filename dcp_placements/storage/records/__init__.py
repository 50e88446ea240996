"""Records of many small tensors of one kind, written and read together."""
