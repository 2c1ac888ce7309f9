"""attnswitch inside other libraries, one file for each."""
