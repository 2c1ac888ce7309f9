"""How a case is run: its operands placed in junk, the public functions called, and what lies around watched.

layouts     operands in memory           call        one case as one call        neighbours    known bytes beside results
parts       keys in parts, merged        graph       a captured call             unguarded     a backend on what it refuses
pages       caches and their tables      sequences   one after another           surroundings  autocast, streams, other GPUs
trees       which tokens are seen
"""
