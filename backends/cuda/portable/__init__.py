"""The portable family: every type and feature, on every GPU from compute capability 7.5 on."""
