"""Rewards: composed of components, by format and by group; from a remote service, a reward model or a function."""
