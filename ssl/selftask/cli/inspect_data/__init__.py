"""`selftask data check|stats|show`."""
