"""Commands of ``selftask eval`` with a page of usage of their own."""
