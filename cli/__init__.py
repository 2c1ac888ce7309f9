"""The command line: typer commands call the library, ``render`` prints."""
