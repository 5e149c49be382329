"""Extensions of Sphinx that build the documentation: see docs/conf.py."""
