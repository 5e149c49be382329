"""Whether W ranks with B / W samples each do what one rank with B samples does."""
