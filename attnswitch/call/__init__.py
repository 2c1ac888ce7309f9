"""One call: from arrays to the kernel that was planned for them."""
