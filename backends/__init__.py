"""The backends. None imports another; each is reached through its row in ``attnswitch.machine.registry``."""
