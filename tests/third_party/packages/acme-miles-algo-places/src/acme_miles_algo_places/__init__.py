"""Advantage places: the place of a reward in its group, whatever its size."""
