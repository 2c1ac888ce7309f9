"""``python -m attnswitch`` is the command ``attnswitch``."""

from importlib import import_module

if __name__ == "__main__":  # workers import this too
    import_module("attnswitch.cli.app").main()
