"""The backward of float32 in one pass over the scores, where a problem has nothing but positions and lengths."""
