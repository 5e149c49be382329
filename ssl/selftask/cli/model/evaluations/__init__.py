"""Commands of ``selftask eval`` with words of their own."""
