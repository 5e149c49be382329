"""Reading files of any size, age and condition."""
