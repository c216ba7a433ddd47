"""What leaving out does to a fit: the result, groups, and the measures that textbooks name."""
