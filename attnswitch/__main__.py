"""``python -m attnswitch`` is the command ``attnswitch``."""

import sys
from importlib import import_module

if __name__ == "__main__":  # workers import this too
    # The current folder, for what is imported from here on; the script and ``python -P`` never have it.
    if not sys.flags.safe_path:
        del sys.path[0]
    import_module("attnswitch.cli.app").main()
