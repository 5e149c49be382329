"""Commands of ``selftask eval`` for patch features."""
