"""How a case is run: its operands placed in junk, the public functions called, and what lies around watched.

layouts     operands in memory         call        one case as one call      neighbours    bytes beside results
parts       keys in parts, merged      graph       a captured call           unguarded     what a backend refuses
pages       caches and their tables    sequences   one after another         surroundings  autocast, streams, GPUs
trees       which tokens are seen
"""
