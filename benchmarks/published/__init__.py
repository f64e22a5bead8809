"""Published measurements as typed rows, and what the planner says of each."""
