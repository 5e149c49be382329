"""Commands that submit jobs and look after them."""
