"""Users' own code: imports, files of plug-ins, and places for messages."""
