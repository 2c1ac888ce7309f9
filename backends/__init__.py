"""The backends. None imports another; the dispatcher reaches each through the row it has in ``attnswitch.registry``."""
