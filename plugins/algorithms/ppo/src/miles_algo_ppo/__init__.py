"""PPO with a critic: preset `ppo`, stage `gae`, term `value`."""
