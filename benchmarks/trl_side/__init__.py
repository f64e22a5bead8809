"""TRL 1.12.0, the last with a PPO: its environment, and a driver that runs in it."""
