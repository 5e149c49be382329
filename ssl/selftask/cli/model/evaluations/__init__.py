"""Commands of ``selftask eval`` that have their own usage text."""
